# SPDX-License-Identifier: Apache-2.0
"""Patches lean on each other no more than their `needs:` lines say."""

from __future__ import annotations

import pytest
from workshop import layer, patch

from seam.apart import leaning, needed
from seam.errors import Kind
from seam.layer import Outcome
from seam.seamfile import Patch

SHOP = {"shop.py": "def f():\n    a(1)\n    b(2)\n    c(3)\n    d(4)\n    return e(5)\n"}


def on_shop(name: str, hunk: str, head: str = "") -> Patch:
    """A patch of the shop."""
    return patch(f"{head}\n+++ shop.py\n{hunk}", name)


def told(*patches: Patch) -> dict[str, list[tuple[Kind, int, tuple[str, ...]]]]:
    """What `leaning` finds among patches that all apply together."""
    results = layer(SHOP, patches)
    assert {result.outcome for result in results.values()} == {Outcome.APPLIED}
    found = leaning(results)
    return {name: [(m.kind, m.line, m.lines) for m in many] for name, many in found.items()}


FIRST = on_shop("first", "@@ f\n- a($x)\n+ abs($x)")
LEANING = [
    ("@@ f\n  abs(1)\n+ len(1)", Kind.NO_ANCHOR),
    ("@@ f\n- d($x)\n+ len($x)\n\n! a($_)", Kind.LEFT_OVER),
]


@pytest.mark.parametrize(("hunk", "kind"), LEANING)
def test_patch_that_fits_only_after_another_is_told(hunk: str, kind: Kind) -> None:
    one, *_ = told(FIRST, on_shop("second", hunk))["second"]
    assert one[0] is kind
    assert one[2][0].startswith("without first, which it does not need: ")
    assert one[2][-1] == "name the one that it leans on: 'needs: NAME'"
    assert told(FIRST, on_shop("second", hunk, "needs: first")) == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("@@ f\n  a(1)\n+ abs(1)", "@@ f\n+ len(0)\n  b(2)"),
        ("@@ f\n  a(1)\n+ abs(1)", "@@ f\n- b($x)\n+ len($x)"),
        ("@@ f\n+ abs(1)", "@@ f\n+ len(0)"),
        ("@@ f\n+ @staticmethod", "@@ f\n+ @classmethod"),
    ],
)
def test_edits_with_no_line_between_touch(one: str, other: str) -> None:
    first = on_shop("first", one)
    ((kind, line, lines),) = told(first, on_shop("second", other))["second"]
    assert kind is Kind.OVERLAP and line > 0
    assert "no line of upstream parts it from first" in lines[0]
    assert told(first, on_shop("second", other, "needs: first")) == {}


def test_edits_with_a_line_between_do_not_touch() -> None:
    assert told(FIRST, on_shop("second", "@@ f\n- c($x)\n+ abs($x)")) == {}
    assert told(FIRST, on_shop("second", "@@ f\n  b(2)\n+ abs(0)")) == {}


def test_lines_are_followed_through_what_later_patches_insert() -> None:
    first = on_shop("first", "@@ f\n- d($x)\n+ abs($x)")
    second = on_shop("second", "@@ f\n  a(1)\n+ abs(0)\n+ abs(0)")
    assert told(first, second, on_shop("third", "@@ f\n+ abs(9)\n  c(3)")) == {}
    found = told(first, second, on_shop("third", "@@ f\n  c(3)\n+ abs(9)"))
    assert "parts it from first" in found["third"][0][2][0]


def test_needs_are_followed_to_the_end() -> None:
    second = on_shop("second", "@@ f\n  abs(1)\n+ abs(2)", "needs: first")
    third = on_shop("third", "@@ f\n  abs(2)\n+ abs(3)", "needs: second")
    results = layer(SHOP, [FIRST, second, third])
    assert needed(results, "third") == ["first", "second"]
    assert leaning(results) == {}
