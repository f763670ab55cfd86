# SPDX-License-Identifier: Apache-2.0
"""Clients give up at random moments, half by closing the connection, half by an abort call."""

from __future__ import annotations

import random
from dataclasses import replace

from pdlab.figures import Figure
from pdlab.scenarios.model import Observation, Scenario, Wave, correctness, leftovers
from pdlab.settings import Settings
from pdlab.traffic import Cancel, random_requests

CANCELLED, PATIENT, AT_A_TIME = 500, 100, 64
PROMPTS, PROMPT, NEW_TOKENS = 60, 40, 100
# As long as a request takes when nobody gives up, so that every state it passes is hit.
LATEST_S = 0.8
# How long one end waits for the half of a request that the other end never began, because the
# abort was there first. SGLang's default of 300 s is the same wait, and the run five times as long.
LIMIT_S = "20"
# That limit, and the 30 s for which an aborted sender is waited for.
SETTLE_S = 60.0
SETTINGS = Settings(
    environment=(
        ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", LIMIT_S),
        ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", LIMIT_S),
    )
)


def waves(vocab: int) -> list[Wave]:
    """Impatient and patient clients mixed; then patient ones alone, on what the others left."""
    when = random.Random(7)
    prompts = random_requests(7, vocab, [PROMPT] * PROMPTS, NEW_TOKENS)
    mixed = [
        replace(
            prompts[number % PROMPTS],
            stream=number % 3 == 0,
            cancel=Cancel(when.uniform(0, LATEST_S), by_call=number % 2 == 0),
        )
        for number in range(CANCELLED)
    ]
    mixed += [prompts[number % PROMPTS] for number in range(PATIENT)]
    when.shuffle(mixed)
    return [
        Wave("aborts", tuple(mixed), concurrency=AT_A_TIME, settle_s=SETTLE_S),
        Wave("afterwards", prompts, settle_s=SETTLE_S),
    ]


def figures(seen: Observation) -> list[Figure]:
    cancelled = float(sum(outcome.cancelled for outcome in seen.outcomes))
    return [
        *correctness(seen),
        Figure("requests cancelled", cancelled),
        *leftovers(seen.waves),
    ]


SCENARIO = Scenario(
    "aborts", "500 of 600 requests cancelled at random moments", SETTINGS, waves, figures
)
