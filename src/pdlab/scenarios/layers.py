# SPDX-License-Identifier: Apache-2.0
"""A draft of one layer per step, each layer with a KV pool of its own, on both ends of the pair."""

from __future__ import annotations

from pdlab.figures import Figure
from pdlab.scenarios.model import (
    Observation,
    Scenario,
    Wave,
    accept_length,
    correctness,
    throughput,
)
from pdlab.settings import Settings
from pdlab.traffic import random_requests

REQUESTS, SHORTEST, STEP, NEW_TOKENS, AT_A_TIME = 32, 40, 5, 80, 4


def waves(vocab: int) -> list[Wave]:
    lengths = [SHORTEST + STEP * number for number in range(REQUESTS)]
    return [Wave("layers", random_requests(9, vocab, lengths, NEW_TOKENS), AT_A_TIME)]


def figures(seen: Observation) -> list[Figure]:
    return [
        *correctness(seen),
        accept_length("accept length", seen.outcomes, aim=True),
        throughput("throughput", seen["layers"]),
    ]


SCENARIO = Scenario(
    "layers",
    "a draft of several layers, each with its own KV",
    Settings(layered_draft=True),
    waves,
    figures,
)
