# SPDX-License-Identifier: Apache-2.0
"""What an edited file does otherwise than before, statement by statement, layout aside."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher

from seam.pattern import HEAD_FIELDS, reads_alike, same
from seam.source import SUITES, Definition, Source, Span

IMPORTS = (ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Change:
    """Statements of one suite that came, went, or read otherwise."""

    scope: str
    """The class or function they are in; empty at the top level."""
    olds: list[ast.stmt]
    news: list[ast.stmt]
    """Empty when they went."""
    before: ast.stmt | None = None
    """The statement above, in the old file; of the same suite."""
    after: ast.stmt | None = None
    """The statement below."""
    decorators: list[ast.expr] = field(default_factory=list)
    """What a definition, the one old statement, is decorated with now and was not."""
    head: bool = False
    """Whether it is the head of the old statement that differs, and not its body."""
    fault: str = ""
    """Why no seam can make this change, when none can."""

    def span(self, source: Source) -> Span:
        """What it touches in the old file, as little as can be said."""
        if not self.olds:
            near = self.after or self.before
            at = source.statement_start(near) if near else 0
            return Span(at, at)
        first, last = self.olds[0], self.olds[-1]
        if self.head:
            body = getattr(first, "body", None) or getattr(first, "cases", None) or [first]
            return Span(source.statement_start(first), source.span(body[0]).start)
        if len(self.olds) == len(self.news) == 1:
            smallest = levels(first, self.news[0])[-1][0]
            if isinstance(smallest, ast.expr):
                return source.span(smallest)
        return Span(source.statement_start(first), source.span(last).end)


def levels(old: ast.AST, new: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    """The pairs of nodes that differ, from the outermost to the smallest part."""
    pairs = [(old, new)]
    while (inner := _only_difference(*pairs[-1])) is not None:
        pairs.append(inner)
    return pairs


def _only_difference(old: ast.AST, new: ast.AST) -> tuple[ast.AST, ast.AST] | None:
    if type(old) is not type(new):
        return None
    differing: list[tuple[object, object]] = []
    for name in old._fields:
        one, other = getattr(old, name, None), getattr(new, name, None)
        if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            differing += [pair for pair in zip(one, other, strict=True) if not reads_alike(*pair)]
        elif not reads_alike(one, other):
            differing.append((one, other))
    if len(differing) != 1:
        return None
    one, other = differing[0]
    return (one, other) if isinstance(one, ast.AST) and isinstance(other, ast.AST) else None


class _Differ:
    """Walks two trees together; suites are aligned by the heads and the texts of statements."""

    def __init__(self, old: Source, new: Source) -> None:
        self.old = old
        self.new = new

    def suite(self, scope: str, olds: list[ast.stmt], news: list[ast.stmt]) -> Iterator[Change]:
        keys = [self.key(self.old, one) for one in olds], [self.key(self.new, one) for one in news]
        for tag, a, b, c, d in SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
            above, below = olds[a - 1] if a else None, olds[b] if b < len(olds) else None
            if tag == "equal" or (tag == "replace" and b - a == d - c):
                for one, other in zip(olds[a:b], news[c:d], strict=True):
                    yield from self.pair(scope, one, other)
            else:
                yield self.change(scope, olds[a:b], news[c:d], above, below)

    def change(
        self,
        scope: str,
        olds: list[ast.stmt],
        news: list[ast.stmt],
        above: ast.stmt | None,
        below: ast.stmt | None,
    ) -> Change:
        fault = ""
        if not scope and not (not olds and all(isinstance(one, IMPORTS) for one in news)):
            fault = "a seam at the top level of a module can only import"
        elif len(olds) > 1:
            fault = "a seam replaces one statement; this replaces several by another number of them"
        return Change(scope, olds, news, above, below, fault=fault)

    def pair(self, scope: str, one: ast.stmt, other: ast.stmt) -> Iterator[Change]:
        if self.text(self.old, one) == self.text(self.new, other) or reads_alike(one, other):
            return
        if isinstance(one, Definition) and isinstance(other, Definition):
            if one.name == other.name and type(one) is type(other):
                yield from self.definition(f"{scope}.{one.name}".lstrip("."), one, other)
                return
        elif type(one) is type(other) and SUITES & {*one._fields}:
            if not _same_head(one, other):
                yield replace(self.change(scope, [one], [other], None, None), head=True)
            yield from self.inner(scope, one, other)
            return
        yield self.change(scope, [one], [other], None, None)

    def definition(self, scope: str, one: Definition, other: Definition) -> Iterator[Change]:
        kept = [new for new in other.decorator_list for old in one.decorator_list
                if reads_alike(new, old)]  # fmt: skip
        came = [new for new in other.decorator_list if new not in kept]
        if len(kept) < len(one.decorator_list) or not _same_head(one, other):
            fault = "a seam does not change the head of a definition; decorate it"
            yield Change(scope, [one], [other], head=True, fault=fault)
        elif came:
            yield Change(scope, [one], [other], decorators=came, head=True)
        yield from self.suite(scope, one.body, other.body)

    def inner(self, scope: str, one: ast.stmt, other: ast.stmt) -> Iterator[Change]:
        for name in ("body", "handlers", "orelse", "finalbody"):
            olds, news = getattr(one, name, []), getattr(other, name, [])
            if name != "handlers":
                yield from self.suite(scope, olds, news)
            elif len(olds) == len(news) and all(map(_same_head, olds, news)):
                for old, new in zip(olds, news, strict=True):
                    yield from self.suite(scope, old.body, new.body)
            else:
                yield self.change(scope, [one], [other], None, None)

    def key(self, source: Source, node: ast.stmt) -> str:
        """What two statements must share to be taken for one, changed perhaps inside."""
        if isinstance(node, Definition):
            return f"{type(node).__name__} {node.name}"
        if SUITES & {*node._fields}:
            return type(node).__name__ + self.text(source, node).partition("\n")[0]
        return self.text(source, node)

    def text(self, source: Source, node: ast.stmt) -> str:
        return source.text(Span(source.statement_start(node), source.span(node).end))


def _same_head(one: ast.AST, other: ast.AST) -> bool:
    return all(
        same(getattr(one, name, None), getattr(other, name, None), {})
        for name in one._fields
        if name not in HEAD_FIELDS and name != "type_comment"
    )


def changes(old: Source, new: Source) -> list[Change]:
    """Everything that `new` does otherwise than `old`; raise `Misfit` when one is not Python."""
    return list(_Differ(old, new).suite("", old.tree.body, new.tree.body))
