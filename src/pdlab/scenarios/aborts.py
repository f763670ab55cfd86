# SPDX-License-Identifier: Apache-2.0
"""Clients give up at random moments, half by closing the connection, half by an abort call."""

from __future__ import annotations

import random
from dataclasses import replace

from pdlab.figures import Better, Figure
from pdlab.scenarios.model import Observation, Scenario, Wave, correctness
from pdlab.settings import Settings
from pdlab.traffic import Cancel, random_requests

CANCELLED, PATIENT, AT_A_TIME = 500, 100, 64
PROMPTS, PROMPT, NEW_TOKENS = 60, 40, 100
# As long as a request takes when nobody gives up, so that every state it passes is hit.
LATEST_S = 0.8
# An aborted sender is waited for up to 30 s.
SETTLE_S = 40.0


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
    slots = seen["afterwards"].slots
    held = float(sum(slots.values()) - slots["free"]) if slots else None
    return [
        *correctness(seen),
        Figure("requests cancelled", cancelled),
        Figure(
            "metadata rows not free", held, "", Better.LOWER, must=None if held is None else 0.0
        ),
    ]


SCENARIO = Scenario(
    "aborts", "500 of 600 requests cancelled at random moments", Settings(), waves, figures
)
