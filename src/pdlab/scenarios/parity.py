# SPDX-License-Identifier: Apache-2.0
"""Tokens through prefill, transfer and decode equal those of an aggregated server."""

from __future__ import annotations

from pdlab.figures import Figure
from pdlab.scenarios.model import (
    Observation,
    Scenario,
    Wave,
    accept_length,
    correctness,
)
from pdlab.settings import Settings
from pdlab.traffic import random_requests

# Around powers of two and page sizes, where chunking and rounding go wrong.
LENGTHS = (1, 2, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513)
NEW_TOKENS = 64


def waves(vocab: int) -> list[Wave]:
    """Every other request is streamed."""
    return [
        Wave("mixed lengths", random_requests(1, vocab, LENGTHS, NEW_TOKENS, stream_every=2)),
        Wave("one token", random_requests(2, vocab, LENGTHS[:8], 1, stream_every=2)),
    ]


def figures(seen: Observation) -> list[Figure]:
    mixed = seen["mixed lengths"]
    return [
        *correctness(seen),
        accept_length("accept length", mixed.outcomes),
    ]


SCENARIO = Scenario(
    "parity", "tokens equal an aggregated server's, all lengths", Settings(), waves, figures
)
