# SPDX-License-Identifier: Apache-2.0
"""Seams that would make a change of upstream's lines, ranked by how many releases they fit."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from seam.changes import Change, levels
from seam.drift import Sources
from seam.errors import Misfit, SeamError
from seam.filelayer import resolve_file
from seam.pattern import HEAD_FIELDS, reads_alike
from seam.resolve import Edit, Standing
from seam.seamfile import FilePatch, parse
from seam.source import Source, Span, Splice, walk

HEAD = "area: a proposal\n\nWhy.\n\nTested: no\n---\n"
"""What makes hunks a seam file that can be parsed."""
EXPRESSIONS = (ast.Call, ast.BinOp, ast.BoolOp, ast.Compare, ast.Subscript, ast.Attribute)
"""Expressions worth an anchor of their own."""


class Rung(IntEnum):
    """How durable an anchor is, the most durable first."""

    DECORATE = 1
    TOP = 2
    STORE = 3
    CALL = 4
    EXACT = 5


@dataclass(frozen=True)
class Proposal:
    """A hunk that makes the change, and the releases it fits as it stands."""

    rung: Rung
    hunk: str
    releases: frozenset[str]


def propose(
    change: Change,
    old: Source,
    new: Source,
    pristine: Source,
    paths: str,
    releases: Sequence[tuple[str, Sources]],
) -> list[Proposal]:
    """Hunks that make `change` of `old`, the best first; empty when no seam can.

    `pristine` is the file without the series, `paths` its names as a seam file writes them, and
    `releases` are those to try it on, by name.
    """
    found: dict[str, Proposal] = {}
    for rung, lines in _candidates(change, old, new):
        hunk = f"@@ {change.scope or 'import'}\n{lines}\n"
        file = _parsed(paths, hunk)
        if file is None or hunk in found or not _makes(file, change, old, pristine):
            continue
        fits = frozenset(name for name, sources in releases if _fits(file, sources))
        if fits:
            found[hunk] = Proposal(rung, hunk, fits)
    return sorted(found.values(), key=lambda one: (-len(one.releases), one.rung, len(one.hunk)))


def _parsed(paths: str, hunk: str) -> FilePatch | None:
    try:
        return parse("proposal", f"{HEAD}+++ {paths}\n{hunk}").files[0]
    except SeamError:
        return None


def _makes(file: FilePatch, change: Change, old: Source, pristine: Source) -> bool:
    """Whether the hunk edits the very place of the change."""
    try:
        edits = resolve_file(file, old, pristine).edits
    except Misfit:
        return False
    return bool(edits) and all(_is_there(edit, change, old) for edit in edits)


def _is_there(edit: Edit, change: Change, old: Source) -> bool:
    if change.olds and not change.decorators:
        start, end = change.span(old)
        return start <= edit.span.start and edit.span.end <= end
    if not change.scope or change.decorators:
        return True
    places = []
    if change.before:
        places.append(old.next_line(old.span(change.before).end))
    if change.after:
        places.append(old.above_comments(old.statement_start(change.after)))
    return edit.span.start in places


def _fits(file: FilePatch, sources: Sources) -> bool:
    source = next(filter(None, map(sources.get, file.paths)), None)
    if source is None:
        return False
    try:
        hunks = resolve_file(file, source, source).hunks
    except Misfit:
        return False
    return all(result.standing is Standing.APPLIED for result in hunks)


# candidates ----------------------------------------------------------------------------------


def _candidates(change: Change, old: Source, new: Source) -> Iterator[tuple[Rung, str]]:
    """Anchors with their `+` lines; whether they hold is asked later."""
    if change.fault:
        return
    if change.decorators:
        text = "\n".join(f"@{new.text(new.span(one))}" for one in change.decorators)
        yield Rung.DECORATE, _marked("+", text)
    elif not change.scope:
        yield Rung.EXACT, _marked("+", _text(new, change.news))
    elif change.olds:
        yield from _replacements(change.olds[0], change.news, change.head, new)
    else:
        yield from _insertions(change, old, new)


def _insertions(change: Change, old: Source, new: Source) -> Iterator[tuple[Rung, str]]:
    plus = _marked("+", _with_comments(change, old, new))
    if change.before is None or _is_docstring(change.before):
        yield Rung.TOP, plus
    for rung, anchor in _anchors(change.before) if change.before else ():
        yield rung, f"  {anchor}\n{plus}"
    for rung, anchor in _anchors(change.after) if change.after else ():
        yield rung, f"{plus}\n  {anchor}"


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _anchors(node: ast.stmt) -> Iterator[tuple[Rung, str]]:
    """One-line patterns of a statement, from the most general to its very text."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        yield Rung.STORE, f"{ast.unparse(node.targets[0])} = $_"
        if isinstance(node.value, ast.Call):
            target = ast.unparse(node.targets[0])
            yield Rung.CALL, f"{target} = {ast.unparse(node.value.func)}($*_)"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        yield Rung.CALL, f"{ast.unparse(function)}($*_)"
        if isinstance(function, ast.Attribute):
            yield Rung.CALL, f"$_.{function.attr}($*_)"
    if isinstance(node, (ast.For, ast.AsyncFor)):
        yield Rung.EXACT, f"for $_ in {ast.unparse(node.iter)}:"
    yield Rung.EXACT, ast.unparse(node).partition("\n")[0]


def _replacements(
    old: ast.stmt, news: list[ast.stmt], head: bool, new: Source
) -> Iterator[tuple[Rung, str]]:
    if not news:
        for rung, anchor in _anchors(old):
            yield rung, f"- {anchor}\n+ pass"
    elif len(news) == 1:
        for one, other in _levels(old, news[0], head):
            yield from _rewrites(one, [other], new)
        if head:
            heads = (ast.unparse(one).partition("\n")[0] for one in (old, news[0]))
            yield Rung.EXACT, "- {}\n+ {}".format(*heads)
    else:
        yield from _rewrites(old, news, new)


def _levels(old: ast.stmt, new: ast.stmt, head: bool) -> Iterator[tuple[ast.AST, ast.AST]]:
    """The pairs worth an anchor, from the smallest part to the whole statements."""
    pair: tuple[object, object] = (old, new)
    if head:
        fields = (name for name in old._fields if name not in HEAD_FIELDS)
        parts = [(getattr(old, name, None), getattr(new, name, None)) for name in fields]
        differing = [part for part in parts if not reads_alike(*part)]
        pair = differing[0] if len(differing) == 1 else (None, None)
    if not (isinstance(pair[0], ast.AST) and isinstance(pair[1], ast.AST)):
        return
    for one, other in reversed(levels(pair[0], pair[1])):
        if isinstance(one, (ast.stmt, *EXPRESSIONS)):
            yield one, other


def _rewrites(old: ast.AST, news: Sequence[ast.AST], new: Source) -> Iterator[tuple[Rung, str]]:
    """Patterns of one node with the holes that the new text can use, most general first."""
    call = old.value if isinstance(old, ast.Expr) else old
    if isinstance(call, ast.Call):
        function = ast.unparse(call.func)
        run = _run(call, news, new)
        if run is not None:
            text = _filled(new, news, [(run, "$*rest")])
            yield Rung.CALL, f"- {function}($*rest)\n{_marked('+', text)}"
        holes, pattern = _arguments(call, news, new)
        yield (
            Rung.CALL,
            (f"- {function}({', '.join(pattern)})\n{_marked('+', _filled(new, news, holes))}"),
        )
    if isinstance(old, ast.Assign) and len(old.targets) == 1:
        target = ast.unparse(old.targets[0])
        places = _places(old.value, news, new)
        hole = "$value" if places else "$_"
        text = _filled(new, news, [(place, "$value") for place in places])
        yield Rung.STORE, f"- {target} = {hole}\n{_marked('+', text)}"
    exact, plus = ast.unparse(old), _filled(new, news, [])
    if "\n" not in exact:
        yield Rung.EXACT, f"- {exact}\n{_marked('+', plus)}"


def _run(call: ast.Call, news: Sequence[ast.AST], new: Source) -> Span | None:
    """Where all arguments of `call` stand in the new text, one after the other."""
    wanted = [*call.args, *call.keywords]
    for node in _all(news):
        if isinstance(node, ast.Call):
            given = [*node.args, *node.keywords]
            if not wanted and not given:
                at = new.span(node).end - 1
                return Span(at, at)
            for at in range(len(given) - len(wanted) + 1) if wanted else ():
                run = given[at : at + len(wanted)]
                if reads_alike(run, wanted):
                    return Span(new.span(run[0]).start, new.span(run[-1]).end)
    return None


def _arguments(
    call: ast.Call, news: Sequence[ast.AST], new: Source
) -> tuple[list[tuple[Span, str]], list[str]]:
    """Holes for the arguments that the new text uses; what it does not use is left open."""
    holes: list[tuple[Span, str]] = []
    pattern = []
    for number, argument in enumerate(call.args):
        places = _places(argument, news, new)
        name = argument.id if isinstance(argument, ast.Name) else f"arg{number}"
        pattern.append(f"${name}" if places else "$_")
        holes += [(place, f"${name}") for place in places]
    while pattern and pattern[-1] == "$_":
        pattern.pop()
    if len(pattern) < len(call.args) or call.keywords:
        pattern.append("$*_")
    return holes, pattern


def _places(wanted: ast.AST, news: Sequence[ast.AST], new: Source) -> list[Span]:
    """Where the new text reads like `wanted`, names and constants without a meaning left out."""
    if isinstance(wanted, (ast.Constant, ast.Starred)):
        return []
    return [new.span(n) for n in _all(news) if type(n) is type(wanted) and reads_alike(n, wanted)]


def _all(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        yield node
        yield from walk(node)


# text ----------------------------------------------------------------------------------------


def _text(source: Source, nodes: Sequence[ast.stmt]) -> str:
    """Statements without their indent."""
    start = source.statement_start(nodes[0])
    return _dedented(source, start, Span(source.line_start(start), source.span(nodes[-1]).end))


def _with_comments(change: Change, old: Source, new: Source) -> str:
    """The statements that came, with those comments above them that came too."""
    start = new.statement_start(change.news[0])
    span = Span(new.above_comments(start), new.line_start(start))
    above = _dedented(new, start, span).split("\n")
    came = [line for line in above if line and line.encode() not in old.raw]
    return "\n".join([*came, _text(new, change.news)])


def _dedented(source: Source, start: int, span: Span) -> str:
    indent = source.indent(start).decode()
    lines = source.text(span).replace("\r\n", "\n").split("\n")
    return "\n".join(line.removeprefix(indent) for line in lines)


def _filled(source: Source, nodes: Sequence[ast.AST], holes: list[tuple[Span, str]]) -> str:
    """The text of nodes without their indent, holes put in."""
    first = nodes[0]
    start = source.statement_start(first) if isinstance(first, ast.stmt) else source.span(first)[0]
    end = source.span(nodes[-1]).end
    piece = Source(source.raw[start:end], source.path)
    apart: list[Splice] = []
    for (low, high), hole in sorted(holes):
        if not apart or low - start >= apart[-1].span.end:
            apart.append(Splice(Span(low - start, high - start), hole.encode()))
    indent = source.indent(start).decode()
    text = piece.splice(apart)[0].decode().replace("\r\n", "\n")
    return "\n".join(line.removeprefix(indent) for line in text.split("\n"))


def _marked(mark: str, text: str) -> str:
    return "\n".join(f"{mark} {line}".rstrip() for line in text.split("\n"))
