# SPDX-License-Identifier: Apache-2.0
"""Shared and repeated prompts with the decode server's radix cache on, in pages of 16."""

from __future__ import annotations

from pdlab.figures import Better, Figure
from pdlab.scenarios.model import Observation, Scenario, Wave, accept_length, correctness
from pdlab.settings import Settings
from pdlab.traffic import random_requests

REQUESTS, PROMPT, SHARED, NEW_TOKENS, ROUNDS = 8, 123, 100, 48, 3


def waves(vocab: int) -> list[Wave]:
    requests = random_requests(5, vocab, [PROMPT] * REQUESTS, NEW_TOKENS, shared=SHARED)
    return [Wave(f"round {number}", requests) for number in range(1, ROUNDS + 1)]


def figures(seen: Observation) -> list[Figure]:
    return [
        *correctness(seen),
        *(
            Figure(
                f"cached tokens, {result.wave.name}",
                max(outcome.cached_tokens for outcome in result.outcomes),
                "",
                Better.HIGHER,
            )
            for result in seen.waves
        ),
        *(accept_length(f"accept length, {r.wave.name}", r.outcomes) for r in seen.waves),
    ]


SCENARIO = Scenario(
    "prefix",
    "decode radix cache, shared and repeated prompts",
    Settings(page_size=16, decode_radix=True),
    waves,
    figures,
)
