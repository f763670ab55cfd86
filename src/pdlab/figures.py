# SPDX-License-Identifier: Apache-2.0
"""A measured figure, which way it ought to go, and what to say of it beside another run's."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace


class Better(enum.Enum):
    """Which way a figure improves; INFO ones are shown and not judged."""

    HIGHER = "higher"
    LOWER = "lower"
    INFO = "info"


class Verdict(enum.Enum):
    BETTER = "better"
    SAME = "same"
    WORSE = "worse"
    NOT_YET = "not better yet"
    NONE = ""


# Two runs of the same servers differ by this much on a machine that does other things as well.
TIMING_NOISE = 0.15
COUNT_NOISE = 0.03


@dataclass(frozen=True)
class Figure:
    """One number a scenario measured.

    `aim`: the series is meant to improve it, so that "same" reads "not better yet". `must`: the
    value without which the run has failed; `most`: above it, it has. `noise`: the relative
    difference that means nothing.
    """

    name: str
    value: float | None
    unit: str = ""
    better: Better = Better.INFO
    aim: bool = False
    must: float | None = None
    most: float | None = None
    noise: float = COUNT_NOISE

    @property
    def holds(self) -> bool:
        """Whether the figure is what it must be."""
        if self.most is not None and self.value is not None and self.value > self.most:
            return False
        return self.must is None or self.value == self.must


def median(rounds: Sequence[Sequence[Figure]]) -> list[Figure]:
    """The figures of several rounds of one scenario, each with its median value.

    A figure that must hold has to hold in each round: the first that does not is kept.
    """
    merged = []
    for same in zip(*rounds, strict=True):
        failed = [figure for figure in same if not figure.holds]
        values = [figure.value for figure in same if figure.value is not None]
        merged.append(
            failed[0]
            if failed
            else replace(same[0], value=statistics.median(values) if values else None)
        )
    return merged


def ratio(stock: Figure, patched: Figure) -> float | None:
    """Patched over stock; None where that says nothing."""
    if not stock.value or patched.value is None:
        return None
    return patched.value / stock.value


def verdict(stock: Figure, patched: Figure) -> Verdict:
    """What the patched run's figure is beside the stock run's."""
    if not patched.holds:
        return Verdict.WORSE if stock.holds else Verdict.NOT_YET
    if patched.better is Better.INFO:
        return Verdict.NONE
    if not stock.holds:
        return Verdict.BETTER
    if stock.value is None or patched.value is None:
        return Verdict.NONE
    gain = patched.value - stock.value
    if patched.better is Better.LOWER:
        gain = -gain
    if abs(gain) <= patched.noise * max(abs(stock.value), abs(patched.value)):
        return Verdict.NOT_YET if patched.aim else Verdict.SAME
    if gain > 0:
        return Verdict.BETTER
    return Verdict.WORSE


def show(figure: Figure) -> str:
    """The value with its unit, as a table shows it."""
    if figure.value is None:
        return "-"
    if figure.unit == "%":
        # rounded down: what is not all must not look like all
        return "100%" if figure.value == 1 else f"{math.floor(figure.value * 1000) / 10:.1f}%"
    if figure.value == int(figure.value) and not figure.unit:
        return f"{figure.value:.0f}"
    digits = 0 if abs(figure.value) >= 100 else 3 if figure.unit == "s" else 2
    return f"{figure.value:.{digits}f}{' ' if figure.unit else ''}{figure.unit}"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median, by ranks: no shape of the spread is assumed."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low = max(0, math.floor(len(values) / 2 - half))
    return ordered[low], ordered[-1 - low]
