# SPDX-License-Identifier: Apache-2.0
"""How long the decode server takes to say that it is well, idle and under a burst."""

from __future__ import annotations

from pdlab.figures import Better, Figure
from pdlab.scenarios.model import Observation, Scenario, Wave, correctness, latency
from pdlab.settings import Settings
from pdlab.traffic import random_requests

IDLE_S = 4.0
REQUESTS, PROMPT, NEW_TOKENS = 64, 40, 100


def waves(vocab: int) -> list[Wave]:
    burst = random_requests(3, vocab, [PROMPT] * REQUESTS, NEW_TOKENS)
    return [Wave("idle", probes=True, idle_s=IDLE_S), Wave("burst", burst, probes=True)]


def figures(seen: Observation) -> list[Figure]:
    rows = correctness(seen)
    for result in seen.waves:
        answered = [probe.latency_s for probe in result.probes if probe.ok]
        missed = float(len(result.probes) - len(answered))
        rows += latency(f"{result.wave.name} probe", answered, aim=True)
        rows.append(Figure(f"{result.wave.name} probes missed", missed, "", Better.LOWER))
    return rows


SCENARIO = Scenario(
    "health", "health probes of decode, idle and in a burst", Settings(), waves, figures
)
