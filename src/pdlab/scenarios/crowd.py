# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests, a fixed number at a time: rows and pages are handed on for minutes."""

from __future__ import annotations

from pdlab.figures import Figure
from pdlab.scenarios.model import (
    Observation,
    Scenario,
    Wave,
    accept_length,
    correctness,
    handed_over,
    latency,
    leftovers,
    throughput,
)
from pdlab.settings import Settings
from pdlab.traffic import random_requests

REQUESTS, AT_A_TIME, PROMPT, NEW_TOKENS = 2000, 64, 40, 100
PROMPTS = 200  # different ones; each is asked ten times
SETTLE_S = 40.0


def waves(vocab: int) -> list[Wave]:
    asked = random_requests(6, vocab, [PROMPT] * PROMPTS, NEW_TOKENS) * (REQUESTS // PROMPTS)
    return [Wave("crowd", asked, concurrency=AT_A_TIME, settle_s=SETTLE_S)]


def figures(seen: Observation) -> list[Figure]:
    crowd = seen["crowd"]
    return [
        *correctness(seen),
        *handed_over(crowd),
        *leftovers(seen.waves),
        accept_length("accept length", crowd.outcomes),
        throughput("throughput", crowd),
        *latency("latency", (outcome.latency_s for outcome in crowd.outcomes)),
    ]


SCENARIO = Scenario("crowd", "2000 requests, 64 at a time", Settings(), waves, figures)
