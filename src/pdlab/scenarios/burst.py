# SPDX-License-Identifier: Apache-2.0
"""Many requests at once, with plenty of KV cache: throughput and latency."""

from __future__ import annotations

from pdlab.figures import Figure
from pdlab.scenarios.model import (
    Observation,
    Scenario,
    Wave,
    accept_length,
    correctness,
    latency,
    throughput,
)
from pdlab.settings import Settings
from pdlab.traffic import random_requests

REQUESTS, PROMPT, NEW_TOKENS = 64, 40, 100


def waves(vocab: int) -> list[Wave]:
    return [Wave("burst", random_requests(3, vocab, [PROMPT] * REQUESTS, NEW_TOKENS))]


def figures(seen: Observation) -> list[Figure]:
    burst = seen["burst"]
    return [
        *correctness(seen),
        accept_length("accept length", burst.outcomes),
        throughput("throughput", burst),
        *latency("latency", (outcome.latency_s for outcome in burst.outcomes)),
    ]


SCENARIO = Scenario("burst", "64 requests at once, plenty of KV", Settings(), waves, figures)
