# SPDX-License-Identifier: Apache-2.0
"""The syntax tree of a file with bodies of functions left out until somebody asks for them.

Most of the time of a run goes into parsing bodies that no seam looks at. Here the bodies of
functions and of methods of top-level classes are found by their indent and replaced by `...`,
line for line; what is left is parsed as a whole. A body whose extent its indent alone does not
prove (strings over several lines, continued lines, tabs) is not left out, and a layout that does
not parse as expected is not outlined at all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

PLACE = re.compile(rb"^(?:(?P<top>[^\s#)\]}@])| {4}(?:async +)?def )", re.MULTILINE)
"""The start of a top-level statement, or of a method."""
TOP_FUNCTION = re.compile(rb"(?:async +)?def ")
LEAVES = {0: re.compile(rb"^[^\s#]", re.MULTILINE), 4: re.compile(rb"^ {0,4}[^\s#]", re.MULTILINE)}
"""By the indent of a function: a line of code that is not in its body."""
DOCSTRING = re.compile(rb"\s*[rRuU]?(?P<quotes>\"\"\"|''')")
UNSURE = (b'"""', b"'''", b"\\\n", b"\\\r", b"\t", b"\f")
"""What may make the indent of a line mean nothing."""
WORTH = 120
"""Bytes of a body below which leaving it out gains nothing."""


class Fold(NamedTuple):
    """A function whose body is left out; offsets are of the file it was read from."""

    line: int
    start: int
    body: int
    end: int
    """Behind its last line of code."""
    stop: int
    """Where the next line of code starts."""
    indent: int

    def stand_in(self, raw: bytes) -> bytes:
        """What stands in the place of the body: as many lines."""
        lines = raw.count(b"\n", self.body, self.stop)
        return b" " * (self.indent + 4) + b"..." + (b"\n" * lines or b"\n")

    def is_read_as(self, node: ast.stmt, raw: bytes) -> bool:
        """Whether a node is the function with nothing but the stand-in in it."""
        if not isinstance(node, Function) or len(node.body) != 1:
            return False
        only = node.body[0]
        at = self.line + raw.count(b"\n", self.start, self.body)
        return isinstance(only, ast.Expr) and (only.lineno, only.end_lineno) == (at, at)

    def unfold(self, node: Function, raw: bytes) -> None:
        """Put the body into the node that stands for the function; `raw` is the file."""
        head = b"class _:\n" if self.indent else b""
        above = b"\n" * (self.line - 1 - bool(head))
        real = ast.parse(above + head + raw[self.start - self.indent : self.stop]).body[0]
        if isinstance(real, ast.ClassDef):
            real = real.body[0]
        assert isinstance(real, Function)
        node.body = real.body
        node.end_lineno, node.end_col_offset = real.end_lineno, real.end_col_offset


def outline(raw: bytes) -> tuple[ast.Module, list[tuple[Function, Fold]]] | None:
    """The tree of `raw` and the functions in it whose bodies are left out; None if it has none.

    Every node stands where it does in the whole tree.
    """
    folds = list(_folds(raw))
    pieces, last = [], 0
    for fold in folds:
        pieces += [raw[last : fold.body], fold.stand_in(raw)]
        last = fold.stop
    try:
        tree = ast.parse(b"".join([*pieces, raw[last:]]))
    except (SyntaxError, ValueError):
        return None
    return (tree, found) if (found := _found(tree, raw, folds)) else None


def _found(tree: ast.Module, raw: bytes, folds: list[Fold]) -> list[tuple[Function, Fold]]:
    """The node of each function that is left out; none at all when one has none."""
    waiting = {fold.line: fold for fold in folds}
    found = []
    for top in tree.body:
        for node in top.body if isinstance(top, ast.ClassDef) else [top]:
            fold = waiting.pop(node.lineno, None)
            if fold is None:
                continue
            if not fold.is_read_as(node, raw):
                return []
            assert isinstance(node, Function)
            found.append((node, fold))
            node.end_lineno = fold.line + raw.count(b"\n", fold.start, fold.end)
            node.end_col_offset = fold.end - raw.rindex(b"\n", 0, fold.end) - 1
        if isinstance(top, ast.ClassDef):
            top.end_lineno = top.body[-1].end_lineno
            top.end_col_offset = top.body[-1].end_col_offset
    return [] if waiting else found


def _folds(raw: bytes) -> Iterator[Fold]:
    """Functions whose extent their indent proves, in the order of the file."""
    in_class, line, counted, stop = False, 1, 0, 0
    for place in PLACE.finditer(raw):
        start = place.start()
        if start < stop:
            continue
        if place["top"]:
            in_class = raw.startswith(b"class ", start)
        if TOP_FUNCTION.match(raw, start) if place["top"] else in_class:
            indent = 0 if place["top"] else 4
            extent = _extent(raw, start, indent)
            if extent:
                line += raw.count(b"\n", counted, start)
                counted, stop = start, extent[-1]
                yield Fold(line, start + indent, *extent, indent)


def _extent(raw: bytes, start: int, indent: int) -> tuple[int, int, int] | None:
    """Where the body of a function starts, its code ends, and the next code starts."""
    leaves = LEAVES[indent]
    head = raw.find(b"\n", start)
    if head < 0:
        return None
    if not raw[start:head].rstrip().endswith(b":"):
        closing = leaves.search(raw, head)
        if not closing or raw[closing.end() - 1 : closing.end()] != b")":
            return None
        head = raw.find(b"\n", closing.end())
        if head < 0 or not raw[closing.end() : head].rstrip().endswith(b":"):
            return None
    body = head + 1
    code = _behind_docstring(raw, body)
    left = leaves.search(raw, code)
    stop = left.start() if left else len(raw)
    if stop - body < WORTH or any(
        raw.find(mark, *part) >= 0 for mark in UNSURE for part in ((start, body), (code, stop))
    ):
        return None
    end = _end_of_code(raw, code, stop)
    return None if end is None else (body, end, stop)


def _behind_docstring(raw: bytes, body: int) -> int:
    """Where code begins in a body; at its start when the string there has no end."""
    opening = DOCSTRING.match(raw, body)
    end = raw.find(opening["quotes"], opening.end()) if opening else -1
    return body if end < 0 else end + 3


def _end_of_code(raw: bytes, code: int, stop: int) -> int | None:
    """Behind the last line in a range that is neither empty nor a comment; None if unsure."""
    for line in reversed(raw[code:stop].splitlines(keepends=True)):
        stop -= len(line)
        if line.strip() and not line.lstrip().startswith(b"#"):
            return None if b"#" in line or b";" in line else stop + len(line.rstrip())
    return code
