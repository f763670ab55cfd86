# SPDX-License-Identifier: Apache-2.0
"""Patterns are matched by shape: what reads the same matches, and nothing else does."""

from __future__ import annotations

import pytest

from seam.errors import Misfit
from seam.pattern import compile_pattern, compile_replacement, find, hole_names
from seam.source import Source


def hits(pattern: str, code: str) -> list[dict[str, str]]:
    """What the holes hold at each place that matches."""
    source = Source(code.encode(), "code.py")
    found = []
    for match in find(compile_pattern(pattern), source, source.tree):
        texts = {}
        for name, bound in match.bindings.items():
            nodes = bound if isinstance(bound, list) else [bound]
            texts[name] = ", ".join(
                node if isinstance(node, str) else source.text(source.span(node)) for node in nodes
            )
        found.append(texts)
    return found


@pytest.mark.parametrize(
    ("pattern", "code", "expected"),
    [
        ("f(1)", "f(\n  1 ,  # one\n)", [{}]),
        ("f(1)", "f(1.0)\nf(True)", []),
        ("f($x)", "f(a + b)", [{"x": "a + b"}]),
        ("f($x)", "f(a, b)", []),
        ("f($x, $x)", "f(a, a)\nf(a, b)", [{"x": "a"}]),
        ("f($_, $_)", "f(a, b)", [{}]),
        ("f($*x)", "f()", [{"x": ""}]),
        ("f($*x)", "f(a, k=1)", [{"x": "a, k=1"}]),
        ("f(a, $*x)", "f(a)\nf(b)", [{"x": ""}]),
        ("f($*x, z)", "f(a, b, z)\nf(z, a)", [{"x": "a, b"}]),
        ("f($*_, key=$v)", "f(a, key=1)\nf(b=2, key=3, c=4)\nf(a)", [{"v": "1"}, {"v": "3"}]),
        ("f(a=1, b=2)", "f(b=2, a=1)\nf(a=1)", [{}]),
        ("f(**$k)", "f(**a)", [{"k": "a"}]),
        ("[$a, $*r]", "[1, 2, 3]", [{"a": "1", "r": "2, 3"}]),
        ("self.$name", "self.total", [{"name": "total"}]),
        ("x.a", "x.a = 1\nprint(x.a)", [{}, {}]),
        ("x[$lo:$hi]", "x[:n]\nx[m:n]", [{"lo": "m", "hi": "n"}]),
        ("x[:$hi]", "x[:n]\nx[m:n]", [{"hi": "n"}]),
        ("x = $v", "x = 1\nx: int = 2\nx += 3", [{"v": "1"}]),
        ("$x and $*_", "a and b and c", [{"x": "a"}]),
        ("if $x:", "if a:\n    b()\nelse:\n    c()", [{"x": "a"}]),
        ("for $i in xs:", "for j in xs:\n    pass\nfor j in ys:\n    pass", [{"i": "j"}]),
        ("try:", "try:\n    a()\nexcept OSError:\n    pass", [{}]),
        ("with $x as $y:", "with a as b:\n    pass", [{"x": "a", "y": "b"}]),
        ("def f($*_):", "@d\ndef f(a, *b, c=1, **k) -> int:\n    return a", [{}]),
        ("def f(a):", "def f(a):\n    pass\ndef f(a, b):\n    pass", [{}]),
        ("return $x", "def f():\n    return 1", [{"x": "1"}]),
        ("f(a)", 'f"{f(a)}"', []),  # positions in f-strings are unreliable before 3.12
    ],
)
def test_pattern_matches_shape(pattern: str, code: str, expected: list[dict[str, str]]) -> None:
    assert hits(pattern, code) == expected


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("self.free(", "not Python"),
        ("a; b", "one expression or one statement"),
        ("$x", "bare hole"),
        ("x = $*y", "where one node must"),
        ("a + $*b", "where one node must"),
    ],
)
def test_pattern_that_says_nothing_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(Misfit, match=reason) as caught:
        compile_pattern(pattern)
    assert caught.value.kind.value == "bad-pattern"


def test_replacement_that_is_a_bare_hole_is_refused() -> None:
    with pytest.raises(Misfit, match="reads like anything"):
        compile_replacement("$x")


def test_dollar_sign_in_a_string_or_a_comment_is_no_hole() -> None:
    assert hole_names('f("$a", $b)  # $c') == {"b"}
    assert hits('f("$a")', 'f("$a")') == [{}]
    assert hits('f("$a")', 'f("b")') == []


def test_rarest_word_is_no_hole_and_not_in_a_string() -> None:
    assert compile_pattern('self.pool.free($identifier, "a long string")').rarest == "self"
