# SPDX-License-Identifier: Apache-2.0
"""How long the decode server takes to say that it is well: idle, asked by many, in a burst."""

from __future__ import annotations

from dataclasses import replace

from pdlab import states
from pdlab.figures import Better, Figure
from pdlab.scenarios.model import Observation, Scenario, Wave, correctness, health, latency
from pdlab.settings import Settings
from pdlab.traffic import random_requests

IDLE_S = 4.0
REQUESTS, PROMPT, NEW_TOKENS = 64, 40, 100
# A probe is answered between two passes of the loop. One core needs 40 to 100 ms for a pass of 64
# requests; of 16 about as long as a GPU does. The others wait in the queues that a probe passes.
RUNNING = 16


def waves(vocab: int) -> list[Wave]:
    burst = random_requests(3, vocab, [PROMPT] * REQUESTS, NEW_TOKENS)
    return [
        Wave("idle", probes=True, idle_s=IDLE_S),
        Wave("20 at once", script=states.at_once),
        Wave("burst", burst, probes=True, http=True),
    ]


def figures(seen: Observation) -> list[Figure]:
    rows = correctness(seen)
    for result in seen.waves:
        rows += health(result.wave.name, result.probes)
    # What the process that speaks HTTP is busy with, no scheduler can make shorter.
    http = latency("burst, HTTP alone", (p.latency_s for p in seen["burst"].http if p.ok))
    return rows + [replace(row, better=Better.INFO) for row in http]


SCENARIO = Scenario(
    "health",
    "health probes of decode, idle, 20 at once, in a burst",
    Settings(decode_flags=("--max-running-requests", str(RUNNING))),
    waves,
    figures,
)
