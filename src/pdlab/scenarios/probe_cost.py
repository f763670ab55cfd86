# SPDX-License-Identifier: Apache-2.0
"""What ten health probes a second cost: the same burst with and without them, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pdlab.figures import Better, Figure
from pdlab.scenarios.model import Observation, Scenario, Wave, correctness, throughput
from pdlab.settings import Settings
from pdlab.traffic import random_requests

PAIRS = 30
REQUESTS, PROMPT, NEW_TOKENS = 64, 40, 100


def waves(vocab: int) -> list[Wave]:
    """One burst to warm up, then pairs; which of a pair comes first alternates."""
    burst = random_requests(3, vocab, [PROMPT] * REQUESTS, NEW_TOKENS)
    made = [Wave("warm", burst)]
    for number in range(PAIRS):
        pair = [Wave(f"quiet {number}", burst), Wave(f"probed {number}", burst, probes=True)]
        made += pair[:: 1 if number % 2 else -1]
    return made


def figures(seen: Observation) -> list[Figure]:
    quiet, probed = (
        [throughput("", seen[f"{name} {number}"]).value or 0.0 for number in range(PAIRS)]
        for name in ("quiet", "probed")
    )
    return [
        *correctness(seen),
        Figure("throughput, quiet", statistics.median(quiet), "tok/s"),
        Figure("throughput, probed", statistics.median(probed), "tok/s"),
        Figure("probed / quiet, median of pairs", _median_ratio(probed, quiet), "", Better.HIGHER),
        Figure("quiet / quiet, median of pairs", _median_ratio(quiet[1:], quiet)),
    ]


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float | None:
    ratios = [one / other for one, other in zip(above, below, strict=False) if one and other]
    return statistics.median(ratios) if ratios else None


SCENARIO = Scenario(
    "probe-cost", "throughput of a burst with and without probes", Settings(), waves, figures
)
