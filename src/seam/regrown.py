# SPDX-License-Identifier: Apache-2.0
"""The syntax tree of a spliced file, made from the one before: only what was touched is parsed.

Nodes that were not touched are taken over as they are, so their line numbers are those of an
earlier file. A table says where each such line starts now; lines that were parsed anew are added
at its end, and their nodes are numbered on from there.
"""

from __future__ import annotations

import ast
import copy
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol


class Before(Protocol):
    """What is asked of the file before, see `Source`."""

    places: list[int]
    raw: bytes

    @property
    def outline(self) -> ast.Module: ...
    def statement_start(self, node: ast.stmt) -> int: ...
    def line_start(self, offset: int) -> int: ...
    def next_line(self, offset: int) -> int: ...
    def end(self, node: ast.stmt) -> int: ...


class Touch(Protocol):
    """A splice: bytes `start` to `end` of the file before become as many as `text` has."""

    @property
    def span(self) -> Sequence[int]: ...
    @property
    def text(self) -> bytes: ...


class CannotRegrow(Exception):
    """The layout is not the common one: the whole file has to be parsed."""


def regrow(before: Before, splices: Sequence[Touch], raw: bytes) -> tuple[ast.Module, list[int]]:
    """The tree of `raw`, and the offset at which each line that its nodes name starts.

    Raises `CannotRegrow` or `SyntaxError` when the file must be parsed as a whole.
    """
    statements = before.outline.body  # first: the table of its lines comes with it
    grower = _Grower(before, splices, raw)
    body = grower.suite(statements, 0, len(before.raw), in_class=False)
    return ast.Module(body=body, type_ignores=[]), grower.places


class _Grower:
    def __init__(self, before: Before, splices: Sequence[Touch], raw: bytes) -> None:
        self.before = before
        self.raw = raw
        self.spans = sorted(tuple(splice.span) for splice in splices)
        order = sorted(splices, key=lambda splice: tuple(splice.span))
        self.starts = [splice.span[0] for splice in order]
        self.ends = [splice.span[1] for splice in order]
        growths = (len(one.text) - (one.span[1] - one.span[0]) for one in order)
        self.growth = list(accumulate(growths, initial=0))
        """How much longer the file is behind the first N splices."""
        # As `moved`, written out: there are thousands.
        self.places = [at + self.growth[bisect_right(self.ends, at)] for at in before.places]

    def moved(self, offset: int, with_inserted: bool = True) -> int:
        """Where an offset is now; behind what was inserted just there, or before it."""
        count = (
            bisect_right(self.ends, offset) if with_inserted else bisect_left(self.starts, offset)
        )
        return offset + self.growth[count]

    def suite(
        self, members: list[ast.stmt], start: int, end: int, in_class: bool
    ) -> list[ast.stmt]:
        """The statements of a suite that spans the lines from `start` to `end`."""
        cuts = [self.before.next_line(self.before.end(member)) for member in members]
        cuts[-1:] = [end]
        if any(low >= high for low, high in pairwise(cuts)):
            raise CannotRegrow  # two on one line
        touched = sorted({at for span in self.spans for at in self.touched(span, cuts)})
        grown: list[ast.stmt] = []
        done = 0
        for first, last in _runs(touched):
            grown += members[done:first]
            low = cuts[first - 1] if first else start
            grown += self.again(members[first : last + 1], low, cuts[last], in_class)
            done = last + 1
        return grown + members[done:]

    def touched(self, span: Sequence[int], cuts: list[int]) -> range:
        """The statements whose lines, with those above them, a splice is in or next to."""
        if not cuts:
            raise CannotRegrow
        first, last = bisect_left(cuts, span[0]), bisect_left(cuts, span[1])
        last += last < len(cuts) - 1 and cuts[last] == span[1]
        return range(min(first, len(cuts) - 1), min(last, len(cuts) - 1) + 1)

    def again(self, members: list[ast.stmt], low: int, high: int, in_class: bool) -> list[ast.stmt]:
        """Statements that were touched: of a class, only the members that were."""
        only = members[0]
        if len(members) == 1 and isinstance(only, ast.ClassDef) and not in_class:
            inner = self.before.line_start(self.before.statement_start(only.body[0]))
            outside = [one for one in self.spans if low <= one[1] and one[0] < inner]
            if inner > self.before.statement_start(only) and not outside:
                grown = copy.copy(only)
                grown.body = self.suite(only.body, inner, high, in_class=True)
                grown.end_lineno = grown.body[-1].end_lineno
                grown.end_col_offset = grown.body[-1].end_col_offset
                return [grown]
        return self.parsed(self.moved(low, with_inserted=False), self.moved(high), in_class)

    def parsed(self, start: int, end: int, in_class: bool) -> list[ast.stmt]:
        """Whole lines of the new file as statements, numbered on from the lines known so far."""
        text = self.raw[start:end]
        numbered_from = b"\n" * len(self.places)
        head = b"class _:\n" if in_class else b""
        body = ast.parse(numbered_from + head + text).body
        if in_class:
            (around,) = body
            assert isinstance(around, ast.ClassDef)
            body = around.body
        sizes = map(len, text.splitlines(keepends=True))
        self.places += [start] if in_class else []  # the head's line, which no node is on
        self.places += accumulate(sizes, initial=start)
        return body


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers, as first and last."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
