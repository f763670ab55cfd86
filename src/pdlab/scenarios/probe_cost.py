# SPDX-License-Identifier: Apache-2.0
"""What ten health probes a second cost: the same burst with and without them, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pdlab.figures import Better, Figure, interval
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
        *_ratios("probed / quiet", probed, quiet, Better.HIGHER),
        # What this machine can tell apart.
        *_ratios("quiet / quiet", quiet[1:], quiet, Better.INFO),
    ]


def _ratios(
    name: str, above: Sequence[float], below: Sequence[float], better: Better
) -> list[Figure]:
    """The median of the pairs' ratios, and the interval in which it is with 95 %."""
    ratios = [one / other for one, other in zip(above, below, strict=False) if one and other]
    low, high = interval(ratios) if ratios else (None, None)
    return [
        Figure(name, statistics.median(ratios) if ratios else None, "", better),
        Figure(f"{name}, at least", low),
        Figure(f"{name}, at most", high),
    ]


SCENARIO = Scenario(
    "probe-cost", "throughput of a burst with and without probes", Settings(), waves, figures
)
