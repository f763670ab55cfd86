# SPDX-License-Identifier: Apache-2.0
"""A decode pool far too small for its requests: most are retracted and resumed, some often.

Now and then SGLang gives up the last running request although it would fit ("Out of memory even
after retracting all other requests"): finished transfers that nobody takes over hold the pool.
"""

from __future__ import annotations

from pdlab.figures import Better, Figure
from pdlab.scenarios.model import (
    Observation,
    Scenario,
    Wave,
    accept_length,
    beside_undisturbed,
    correctness,
    throughput,
)
from pdlab.settings import Settings
from pdlab.traffic import random_requests

REQUESTS, PROMPT, NEW_TOKENS = 96, 40, 300


def waves(vocab: int) -> list[Wave]:
    return [Wave("pressure", random_requests(4, vocab, [PROMPT] * REQUESTS, NEW_TOKENS))]


def figures(seen: Observation) -> list[Figure]:
    outcomes = [outcome for outcome in seen.outcomes if outcome.ok]
    retracted = [outcome for outcome in outcomes if outcome.retractions]
    others = [outcome for outcome in outcomes if not outcome.retractions]
    lost, kept = accept_length("", retracted).value, accept_length("", others).value
    return [
        *correctness(seen, may_fail=True),
        accept_length("accept length, retracted", retracted, aim=True),
        accept_length("accept length, others", others),
        Figure("retracted / others", lost / kept if lost and kept else None, "", Better.HIGHER),
        beside_undisturbed(
            "retracted / undisturbed",
            seen,
            "pressure",
            lambda number: seen["pressure"].outcomes[number].retractions > 0,
            aim=True,
        ),
        throughput("throughput", seen["pressure"], aim=True),
        Figure("requests retracted", float(len(retracted))),
        Figure("retractions", float(sum(outcome.retractions for outcome in outcomes))),
    ]


SCENARIO = Scenario(
    "pressure",
    "KV pressure on decode, most requests are retracted",
    Settings(decode_kv_tokens=1200, decode_reserved_tokens=8),
    waves,
    figures,
)
