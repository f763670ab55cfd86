# SPDX-License-Identifier: Apache-2.0
"""The text of a replacement: holes filled from the source, and only what differs rewritten."""

from __future__ import annotations

import ast
import re
from itertools import product
from typing import Any, NamedTuple

from seam.errors import Kind, Misfit
from seam.pattern import (
    HEAD_FIELDS,
    TOKEN,
    UNREAD_FIELDS,
    Bindings,
    Bound,
    Replacement,
    compile_replacement,
    has_comment,
    reads_alike,
    same,
)
from seam.source import Source, Span, Splice

ATOMS = (
    ast.Attribute,
    ast.Call,
    ast.Constant,
    ast.Dict,
    ast.DictComp,
    ast.List,
    ast.ListComp,
    ast.Name,
    ast.Set,
    ast.SetComp,
    ast.Subscript,
)
"""Expressions that stand anywhere without parentheses."""

KEPT = "\0"
"""Starts a line that came with a hole: it has its indent, or is the inside of a string."""
POSITIONED = (ast.expr, ast.stmt, ast.arg, ast.keyword, ast.alias)


def fill(source: Source, put: Replacement, bindings: Bindings) -> str:
    """The `+` lines with their holes filled; `KEPT` marks lines whose indent is final.

    The plainest text is taken that reads exactly like the replacement: parentheses and
    joined-up runs only where they are needed, continuation lines of a hole moved with it
    unless that would change a string. Raises `Misfit` (broken) when no text does.
    """
    if not put.text or "$" not in put.text:
        return put.text
    for parenthesise, joined, moved in product((False, True), (False, True), (True, False)):
        text = _Filler(source, bindings, parenthesise, joined, moved).fill(put.text)
        if _reads_like(text.replace(KEPT, ""), put, bindings):
            return text
    raise Misfit(Kind.BROKEN, f"{put.text!r} does not read the same once its holes are filled")


def block(text: str, indent: bytes, newline: bytes) -> bytes:
    """Whole lines at `indent`; their inner depth turns to tabs where the file uses them."""
    lines = [_indented(line, indent) for line in text.split("\n")]
    return b"".join(line + newline for line in lines)


def inline(text: str, indent: bytes, newline: bytes) -> bytes:
    """Text that starts in the middle of a line; the lines after its first stand at `indent`."""
    first, *rest = text.split("\n")
    return newline.join([first.encode(), *(_indented(line, indent) for line in rest)])


def _indented(line: str, indent: bytes) -> bytes:
    if line.startswith(KEPT):
        return line[len(KEPT) :].encode()
    if not line.strip():
        return b""
    depth = len(line) - len(line.lstrip(" "))
    inner = "\t" * (depth // 4) + " " * (depth % 4) if b"\t" in indent else " " * depth
    return indent + (inner + line.lstrip(" ")).encode()


class _Filler:
    """One way to write a replacement; see `fill`."""

    def __init__(
        self, source: Source, bindings: Bindings, parenthesise: bool, joined: bool, moved: bool
    ) -> None:
        self.source = source
        self.bindings = bindings
        self.parenthesise = parenthesise
        self.joined = joined
        self.moved = moved

    def fill(self, text: str) -> str:
        for name, bound in self.bindings.items():
            if bound == []:
                text = _without_run(text, name)
        return "\n".join(self.line(line) for line in text.split("\n"))

    def line(self, line: str) -> str:
        depth = line[: len(line) - len(line.lstrip())] if self.moved else ""

        def put(match: re.Match[str]) -> str:
            bound = self.bindings[match["name"]] if match["name"] else match["plain"]
            return self.bound(bound).replace("\n", f"\n{KEPT}{depth}")

        return TOKEN.sub(put, line)

    def bound(self, bound: Bound) -> str:
        if isinstance(bound, str):
            return bound
        if isinstance(bound, list):
            if self.joined:
                return ", ".join(self.text(item, item) for item in bound)
            return self.text(bound[0], bound[-1])
        text = self.text(bound, bound)
        bare = isinstance(bound, ast.expr) and not isinstance(bound, ATOMS)
        return f"({text})" if bare and self.parenthesise else text

    def text(self, first: ast.AST, last: ast.AST) -> str:
        span = Span(self.source.span(first).start, self.source.span(last).end)
        return self.source.text(span).replace("\r\n", "\n")


def _without_run(text: str, name: str) -> str:
    """Take out an empty run together with the comma that belongs to it."""
    text = re.sub(rf",\s*\$\*{name}\b", "", text)
    return re.sub(rf"\$\*{name}\b\s*,?[ \t]*", "", text)


def _reads_like(text: str, put: Replacement, bindings: Bindings) -> bool:
    try:
        filled = compile_replacement(text, put.is_head, comments=has_comment(put.text))
    except Misfit:
        return False
    return same(list(put.body), list(filled.body), dict(bindings))


# narrowing -----------------------------------------------------------------------------------


class Rewrite(NamedTuple):
    """A splice, and the node that must stand there afterwards if the text is one node."""

    splice: Splice
    node: ast.AST | None


def rewrite(source: Source, put: Replacement, target: ast.AST, bindings: Bindings) -> list[Rewrite]:
    """What turns `target` into the replacement.

    Only the parts that differ are rewritten, so that a wrapped call keeps its layout. Raises
    `Misfit` (bad-pattern) when the head of a statement would need more than that.
    """
    text = fill(source, put, bindings)
    plain = text.replace(KEPT, "")
    if compile_replacement(plain, put.is_head).node is None:
        return [Rewrite(_splice(source, target, text), None)]
    parsed = Source((plain + " ..." if put.is_head else plain).encode(), "the replacement")
    statement = parsed.tree.body[0]
    wanted = statement.value if isinstance(statement, ast.Expr) else statement
    parts = _differing(target, wanted, HEAD_FIELDS if put.is_head else frozenset())
    if put.is_head and any(part is target for part, _ in parts):
        raise Misfit(Kind.BAD_PATTERN, f"{put.text!r} changes more than a part of the head")
    return [
        Rewrite(_splice(source, part, text if part is target else _segment(parsed, text, new)), new)
        for part, new in parts
    ]


def _splice(source: Source, target: ast.AST, text: str) -> Splice:
    span = source.span(target)
    return Splice(span, inline(text, source.indent(span.start), source.newline))


def _differing(
    target: ast.AST, wanted: ast.AST, unread: frozenset[str] = frozenset()
) -> list[tuple[ast.AST, ast.AST]]:
    """The smallest parts of `target` to rewrite, each with what takes its place.

    Empty when a part without a position differs, so that a parent must be rewritten.
    """
    whole: list[tuple[ast.AST, ast.AST]] = (
        [(target, wanted)] if isinstance(target, POSITIONED) else []
    )
    if type(target) is not type(wanted) or isinstance(target, ast.JoinedStr):
        return whole
    parts: list[tuple[ast.AST, ast.AST]] = []
    for field in target._fields:
        old, new = getattr(target, field, None), getattr(wanted, field, None)
        if field in UNREAD_FIELDS or field in unread or reads_alike(old, new):
            continue
        for old_child, new_child in _children(old, new):
            if not (isinstance(old_child, ast.AST) and isinstance(new_child, ast.AST)):
                return whole
            smaller = _differing(old_child, new_child)
            # A bare generator shares its parentheses with the call it is the argument of.
            is_generator = isinstance(old_child, ast.GeneratorExp)
            if not smaller or (is_generator and smaller[0][0] is old_child):
                return whole
            parts += smaller
    return parts


def _children(old: Any, new: Any) -> list[tuple[Any, Any]]:
    """The pairs that differ; lists are compared item by item when they are of one length."""
    if not (isinstance(old, list) and isinstance(new, list)):
        return [(old, new)]
    if len(old) != len(new):
        return [(None, None)]
    return [pair for pair in zip(old, new, strict=True) if not reads_alike(*pair)]


def _segment(parsed: Source, text: str, part: ast.AST) -> str:
    """The text of a part of the replacement, with the parentheses that group it.

    `parsed` is `text` without its marks.
    """
    span = parsed.span(part)
    before, after = parsed.raw[: span.start].rstrip(), parsed.raw[span.end :].lstrip()
    calls = before[-2:-1].isalnum() or before[-2:-1] in (b"_", b")", b"]")
    if before.endswith(b"(") and after.startswith(b")") and not calls:
        span = Span(len(before) - 1, len(parsed.raw) - len(after) + 1)
    marked = text.encode()
    places = [at for at, byte in enumerate(marked) if byte != ord(KEPT)]
    return marked[places[span.start] : places[span.end - 1] + 1].decode()
