# SPDX-License-Identifier: Apache-2.0
"""A verdict says what two figures say, and never more."""

from __future__ import annotations

import pytest

from pdlab.figures import Better, Figure, Verdict, interval, median, ratio, show, verdict

HIGHER, LOWER, INFO = Better.HIGHER, Better.LOWER, Better.INFO


def figure(value: float | None, better: Better = HIGHER, **more: object) -> Figure:
    return Figure("name", value, "", better, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stock", "patched", "better", "aim", "expected"),
    [
        (1.36, 3.75, HIGHER, True, Verdict.BETTER),
        (3.90, 3.91, HIGHER, False, Verdict.SAME),
        (1.36, 1.36, HIGHER, True, Verdict.NOT_YET),
        (3.90, 3.50, HIGHER, True, Verdict.WORSE),
        (1.003, 0.004, LOWER, True, Verdict.BETTER),
        (1.003, 1.004, LOWER, True, Verdict.NOT_YET),
        (1.0, 2.0, LOWER, False, Verdict.WORSE),
        (0.0, 0.0, LOWER, False, Verdict.SAME),
        (0.0, 3.0, LOWER, False, Verdict.WORSE),
        (3.0, 0.0, LOWER, False, Verdict.BETTER),
        (292.0, 12.0, INFO, False, Verdict.NONE),
        (None, 3.0, HIGHER, False, Verdict.NONE),
        (3.0, None, HIGHER, False, Verdict.NONE),
    ],
)
def test_verdict(
    stock: float | None, patched: float | None, better: Better, aim: bool, expected: Verdict
) -> None:
    assert verdict(figure(stock, better, aim=aim), figure(patched, better, aim=aim)) is expected


@pytest.mark.parametrize(
    ("stock", "patched", "expected"),
    [
        (1.0, 1.0, Verdict.SAME),
        (1.0, 0.999, Verdict.WORSE),  # however little: noise is no excuse for a wrong token
        (0.5, 1.0, Verdict.BETTER),
        (0.5, 0.6, Verdict.NOT_YET),
    ],
)
def test_what_must_hold_is_judged_without_noise(
    stock: float, patched: float, expected: Verdict
) -> None:
    assert verdict(figure(stock, must=1.0), figure(patched, must=1.0)) is expected


def test_a_missing_value_does_not_hold() -> None:
    assert not figure(None, must=1.0).holds


def test_noise_is_relative_to_the_figure() -> None:
    wide = Figure("throughput", 100.0, "tok/s", HIGHER, noise=0.15)
    assert verdict(wide, Figure("", 110.0, "", HIGHER, noise=0.15)) is Verdict.SAME
    assert verdict(wide, Figure("", 130.0, "", HIGHER, noise=0.15)) is Verdict.BETTER


def test_rounds_give_the_median_and_never_hide_a_failure() -> None:
    rounds = [[figure(1.0), figure(share, must=1.0)] for share in (1.0, 0.9, 1.0)]
    rounds[1][0] = figure(9.0)
    value, share = median(rounds)
    assert value.value == 1.0
    assert share.value == 0.9


def test_ratio_is_patched_over_stock() -> None:
    assert ratio(figure(2.0), figure(5.0)) == 2.5
    assert ratio(figure(0.0), figure(5.0)) is None
    assert ratio(figure(2.0), figure(None)) is None


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "s", "-"),
        (1.0, "%", "100%"),
        (0.9896, "%", "98.9%"),
        (0.99999, "%", "99.9%"),
        (292.0, "", "292"),
        (3.7865, "", "3.79"),
        (1.0031, "s", "1.003 s"),
        (1283.7, "tok/s", "1284 tok/s"),
    ],
)
def test_values_are_shown_readably(value: float | None, unit: str, text: str) -> None:
    assert show(Figure("name", value, unit)) == text


def test_an_interval_holds_the_median_and_narrows_with_more_values() -> None:
    few, many = interval(range(10)), interval(range(1000))
    assert few[0] <= 4.5 <= few[1]
    assert many[0] <= 499.5 <= many[1]
    assert (many[1] - many[0]) / 1000 < (few[1] - few[0]) / 10
    assert interval([1.0]) == (1.0, 1.0)
