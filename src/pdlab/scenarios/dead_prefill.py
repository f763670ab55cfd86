# SPDX-License-Identifier: Apache-2.0
"""Prefill is killed with KV in flight: its requests fail, decode stays healthy."""

from __future__ import annotations

from pdlab import states
from pdlab.figures import Figure
from pdlab.scenarios.model import Observation, Scenario, Wave, correctness, count, health
from pdlab.settings import Settings
from pdlab.traffic import random_requests

REQUESTS, PROMPT, NEW_TOKENS = 64, 120, 16
CALM_REQUESTS = 8
CHUNK = 64  # so that prefill takes a while


def waves(vocab: int) -> list[Wave]:
    """Some requests while prefill lives, whose tokens can be compared; then those that lose it."""
    calm = random_requests(38, vocab, [PROMPT] * CALM_REQUESTS, NEW_TOKENS)
    burst = random_requests(37, vocab, [PROMPT] * REQUESTS, NEW_TOKENS)
    return [Wave("alive", calm), Wave("dead prefill", burst, script=states.losing_prefill)]


def figures(seen: Observation) -> list[Figure]:
    wave = seen["dead prefill"]
    return [
        *correctness(seen, may_fail=True),
        *health(wave.wave.name, wave.probes),
        count(wave, "transfers in flight"),
    ]


SCENARIO = Scenario(
    "dead-prefill",
    "prefill killed with KV in flight",
    Settings(prefill_flags=("--chunked-prefill-size", str(CHUNK))),
    waves,
    figures,
    ends_servers=True,
)
