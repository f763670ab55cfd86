# SPDX-License-Identifier: Apache-2.0
"""Where the seams of a hunk go in one release, or precisely why one does not fit."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from seam.errors import Kind, Misfit
from seam.fill import block, fill, rewrite
from seam.pattern import Bindings, Match, Pattern, find, match, reads_alike, same
from seam.seamfile import Alternative, Hunk, Op, Seam
from seam.source import Definition, Scope, Source, Span, walk

NEAR_RATIO = 0.5
"""Likeness from which a line is worth showing as the nearest."""


class Standing(str, Enum):
    """How a seam, a hunk or a file of ours stands in a release."""

    APPLIED = "applied"
    PRESENT = "present"
    UPSTREAM = "upstream"
    ABSENT = "absent"
    """An optional hunk whose place is not in this release."""


@dataclass(frozen=True)
class Edit:
    """Bytes that one seam rewrites or inserts."""

    seam: Seam
    span: Span
    text: bytes
    holes: dict[str, str]
    """What each named hole reads in the source."""
    whole: Span
    """The place that reads like the anchor; the empty place of insertion otherwise."""
    node: ast.AST | None = None
    """What must stand there afterwards, if the text is one node of a replacement."""


@dataclass(frozen=True)
class HunkResult:
    """What became of a hunk, and where upstream's cure reads."""

    hunk: Hunk
    standing: Standing
    edits: tuple[Edit, ...] = ()
    note: str = ""


# hunks ---------------------------------------------------------------------------------------


def resolve_hunk(hunk: Hunk, current: Source, pristine: Source) -> HunkResult:
    """Resolve the one alternative of a hunk that fits; raise `Misfit` when not just one does.

    Places are sought in `current`, the file as earlier patches left it. Whether a hunk is
    present or cured upstream is asked of `pristine` alone, so that what this series itself put
    there never counts.
    """
    fits: list[tuple[Alternative, HunkResult]] = []
    misfits: list[Misfit] = []
    for alternative in hunk.alternatives:
        try:
            fits.append((alternative, _resolve_alternative(hunk, alternative, current, pristine)))
        except Misfit as misfit:
            misfits.append(misfit)
    # Alternatives with one replacement are all present once one of them was applied.
    nothing_to_do = len({result.standing for _, result in fits}) == 1 and not fits[0][1].edits
    if len(fits) == 1 or nothing_to_do:
        return fits[0][1]
    if fits:
        lines = ", ".join(str(alternative.line) for alternative, _ in fits)
        raise Misfit(
            Kind.AMBIGUOUS,
            f"{len(fits)} alternatives fit (lines {lines} of the seam); exactly one must",
            line=fits[0][0].line,
        )
    if hunk.optional and all(_means_absent(hunk, misfit) for misfit in misfits):
        return HunkResult(hunk, Standing.ABSENT)
    if len(misfits) == 1:
        raise misfits[0]
    raise Misfit(
        misfits[0].kind,
        f"none of {len(misfits)} alternatives fits",
        line=hunk.alternatives[0].line,
        explain=lambda: (line for misfit in misfits for line in misfit.lines),
    )


def _means_absent(hunk: Hunk, misfit: Misfit) -> bool:
    """A missing scope, or for a replacement a missing anchor, which `!` proves to be gone."""
    return misfit.kind is Kind.NO_SCOPE or (misfit.kind is Kind.NO_ANCHOR and hunk.replaces_only)


def _resolve_alternative(
    hunk: Hunk, alternative: Alternative, current: Source, pristine: Source
) -> HunkResult:
    edits: list[Edit] = []
    standings: list[Standing] = []
    notes: list[str] = []
    for seam in alternative.seams:
        found = standing(seam, current if seam.op is Op.IMPORT else pristine)
        standings.append(found or Standing.APPLIED)
        if found is None:
            edits += _edits(seam, current, pristine)
        elif found is Standing.UPSTREAM:
            notes.append(_cure_note(seam, pristine))
    for verdict in (Standing.APPLIED, Standing.UPSTREAM):
        if verdict in standings:
            return HunkResult(hunk, verdict, tuple(edits), "; ".join(notes))
    return HunkResult(hunk, Standing.PRESENT)


def standing(seam: Seam, source: Source) -> Standing | None:
    """PRESENT or UPSTREAM when `source` has the change already, None when it must be made.

    Present is asked before upstream, or our own result would be taken for upstream's.
    """
    cure = _cure(seam, source)
    try:
        root, bindings = _root(seam, source)
    except Misfit:
        return Standing.UPSTREAM if cure else None
    done = _done(seam, root, source, bindings)
    hits = _hits(seam, source, root, bindings) if seam.op is Op.REPLACE else []
    if hits and cure:
        anchor = f"{_anchor(seam).text!r} (line {source.line_of(hits[0].node)})"
        raise Misfit(
            Kind.AMBIGUOUS,
            f"{seam.scope}: both {anchor} and upstream's cure {cure[0].text!r} read there",
            line=seam.line,
        )
    present = done >= seam.times and not hits if seam.op is Op.REPLACE else done == seam.times
    if present:
        return Standing.PRESENT
    return Standing.UPSTREAM if cure else None


def _cure(seam: Seam, source: Source) -> tuple[Pattern, int] | None:
    """Upstream's own cure in the scope of the seam, and its line."""
    try:
        root = source.scope(seam.scope) if seam.cures else None
    except Misfit:
        return None
    for cure in seam.cures:
        hit = next(find(cure, source, root), None) if root else None
        if hit:
            return cure, source.line_of(hit.node)
    return None


def _cure_note(seam: Seam, source: Source) -> str:
    found = _cure(seam, source)
    assert found is not None
    return f"{source.path}:{found[1]} {seam.scope} reads {found[0].text!r}"


# places --------------------------------------------------------------------------------------


def _root(seam: Seam, source: Source) -> tuple[Scope | ast.stmt, Bindings]:
    """The statement in which the anchor is sought, and what the heads around it bind."""
    if seam.op is Op.IMPORT:
        return source.outline, {}
    try:
        root: Scope | ast.stmt = source.scope(seam.scope)
    except Misfit as misfit:
        misfit.line = seam.line
        raise
    bindings: Bindings = {}
    for head in seam.inside:
        hits = list(find(head, source, root, bindings))
        if len(hits) != 1:
            raise _unfit(seam, source, root, head, hits, 1)
        assert isinstance(hits[0].node, ast.stmt)
        root, bindings = hits[0].node, hits[0].bindings
    return root, bindings


def _anchor(seam: Seam) -> Pattern:
    assert seam.anchor is not None
    return seam.anchor


def _hits(seam: Seam, source: Source, root: ast.AST, bindings: Bindings) -> list[Match]:
    """Places that read like the anchor; not what reads as wanted already, nor anything in it."""
    anchor = _anchor(seam)
    if seam.op is not Op.REPLACE:
        return [hit for hit, _, _ in _statement_hits(seam, source, root, bindings)]
    wanted = {
        id(inner)
        for run in _wanted_runs(seam, source, root)
        for node in run
        for inner in (node, *walk(node))
    }
    hits = (
        _statements(anchor, source, root, bindings)
        if isinstance(anchor.node, ast.expr) and not seam.put.is_expression
        else find(anchor, source, root, bindings)
    )
    return [hit for hit in hits if id(hit.node) not in wanted]


def _statements(
    anchor: Pattern, source: Source, root: ast.AST, bindings: Bindings
) -> Iterator[Match]:
    """Statements that read like the anchor; an expression must be the whole statement."""
    is_expression = isinstance(anchor.node, ast.expr)
    for node in source.nodes(root, ast.Expr if is_expression else type(anchor.node)):
        found = match(anchor, node.value if isinstance(node, ast.Expr) else node, bindings)
        if found is not None:
            yield Match(node, found)


def _statement_hits(
    seam: Seam, source: Source, root: ast.AST, bindings: Bindings
) -> Iterator[tuple[Match, list[ast.stmt], int]]:
    """Statements an insertion anchors on, with the suite and the index they stand at."""
    places = {
        id(node): (suite, at) for suite in source.suites(root) for at, node in enumerate(suite)
    }
    for hit in _statements(_anchor(seam), source, root, bindings):
        yield (hit, *places[id(hit.node)])


def _runs(wanted: tuple[ast.stmt, ...], suite: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    for at in range(len(suite) - len(wanted) + 1):
        run = suite[at : at + len(wanted)]
        if same(list(wanted), run, {}):
            yield run


def _wanted_runs(seam: Seam, source: Source, root: ast.AST) -> list[list[ast.AST]]:
    """Places that read like the replacement, each as the nodes it takes up."""
    put = seam.put
    if put.is_head and put.node is not None:
        head = Pattern(put.text, put.node, is_head=True)
        return [[hit.node] for hit in find(head, source, root)]
    if put.is_expression and put.node is not None:
        return [
            [hit.node] for hit in find(Pattern(put.text, put.node, is_head=False), source, root)
        ]
    return [[*run] for suite in source.suites(root) for run in _runs(put.body, suite)]


def _done(seam: Seam, root: Scope | ast.stmt, source: Source, bindings: Bindings) -> int:
    """How many places already read as wanted; for an insertion, how many anchors have theirs."""
    if seam.op is Op.REPLACE:
        return len(_wanted_runs(seam, source, root))
    if seam.op is Op.IMPORT:
        return int(_imported(seam.put.body) <= _imported(source.outline.body))
    if seam.op is Op.DECORATE:
        assert isinstance(root, Definition) and isinstance(seam.put.body[0], Definition)
        there = root.decorator_list
        wanted = seam.put.body[0].decorator_list
        return int(all(any(reads_alike(one, other) for other in there) for one in wanted))
    if seam.op is Op.TOP:
        assert isinstance(root, Definition)
        return min(1, sum(1 for _ in _runs(seam.put.body, root.body)))
    return sum(
        any(
            same(list(seam.put.body), run, dict(hit.bindings))
            for run in _neighbours(seam, suite, at)
        )
        for hit, suite, at in _statement_hits(seam, source, root, bindings)
    )


def _neighbours(seam: Seam, suite: list[ast.stmt], at: int) -> Iterator[list[ast.stmt]]:
    """Runs of statements on the side of the anchor where the insertion would stand.

    Not only the next ones: another patch may have put its own lines between.
    """
    size = len(seam.put.body)
    side = suite[:at] if seam.op is Op.BEFORE else suite[at + 1 :]
    for start in range(len(side) - size + 1):
        yield side[start : start + size]


def _imported(body: list[ast.stmt] | tuple[ast.stmt, ...]) -> set[tuple[object, ...]]:
    """The bindings that top-level imports make."""
    names: set[tuple[object, ...]] = set()
    for node in body:
        if isinstance(node, ast.Import):
            names |= {("import", alias.name, alias.asname) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {(node.level, node.module, alias.name, alias.asname) for alias in node.names}
    return names


# edits ---------------------------------------------------------------------------------------


def _edits(seam: Seam, source: Source, pristine: Source) -> list[Edit]:
    root, bindings = _root(seam, source)
    if seam.op is Op.IMPORT:
        return [_insertion(seam, source, _import_place(source, pristine), b"", {})]
    if seam.op in (Op.DECORATE, Op.TOP):
        assert isinstance(root, Definition)
        at, indent = _definition_place(seam, source, root)
        return [_insertion(seam, source, at, indent, {})]
    hits = _hits(seam, source, root, bindings)
    if len(hits) != seam.times:
        raise _unfit(seam, source, root, _anchor(seam), hits, seam.times)
    make = _replacement if seam.op is Op.REPLACE else _beside
    return [edit for hit in hits for edit in make(seam, source, hit)]


def _insertion(seam: Seam, source: Source, at: int, indent: bytes, bindings: Bindings) -> Edit:
    text = block(fill(source, seam.put, bindings), indent, source.newline)
    if at and source.raw[at - 1 : at] not in (b"\n", b"\r"):
        text = source.newline + text
    return Edit(seam, Span(at, at), text, _hole_texts(source, bindings), Span(at, at))


def _import_place(source: Source, pristine: Source) -> int:
    """Under the last top-level import that no patch has put one under yet.

    One line of upstream then stands between the imports of two patches, so that git can take
    either without the other.
    """
    body = source.outline.body
    end = next((at for at, node in enumerate(body) if isinstance(node, Definition)), len(body))
    ours = _imported(body[:end]) - _imported(pristine.outline.body)
    imports = [at for at in range(end) if isinstance(body[at], (ast.Import, ast.ImportFrom))]
    taken = {at for at in imports if _imported([body[at]]) & ours}
    free = [at for at in imports if not {at, at + 1} & taken and _ends_line(source, body[at])]
    if imports:
        return source.next_line(source.span(body[(free or imports)[-1]]).end)
    if ast.get_docstring(source.outline) is not None:
        return source.next_line(source.span(body[0]).end)
    return source.line_start(source.statement_start(body[0])) if body else len(source.raw)


def _ends_line(source: Source, node: ast.stmt) -> bool:
    return source.ends_line(source.span(node).end)


def _definition_place(seam: Seam, source: Source, root: Definition) -> tuple[int, bytes]:
    """Where a decorator or the top of the body goes, and its indent."""
    start = source.statement_start(root)
    if seam.op is Op.DECORATE:
        return source.line_start(start), source.indent(start)
    first = root.body[0]
    start, end = source.statement_start(first), source.span(first).end
    if not source.begins_line(start):
        raise _shares_line(seam, source, start)
    if ast.get_docstring(root) is None:
        return source.above_comments(start), source.indent(start)
    if not source.ends_line(end):
        raise _shares_line(seam, source, start)
    return source.next_line(end), source.indent(start)


def _beside(seam: Seam, source: Source, hit: Match) -> list[Edit]:
    assert isinstance(hit.node, ast.stmt)
    start, end = source.statement_start(hit.node), source.span(hit.node).end
    _require_own_lines(seam, source, start, end)
    at = source.above_comments(start) if seam.op is Op.BEFORE else source.next_line(end)
    return [_insertion(seam, source, at, source.indent(start), hit.bindings)]


def _replacement(seam: Seam, source: Source, hit: Match) -> list[Edit]:
    whole = source.span(hit.node)
    rewrites = rewrite(source, seam.put, hit.node, hit.bindings)
    rewrites_whole = rewrites[0].splice.span == whole
    simple = seam.put.one_line and (seam.put.is_expression or not _is_compound(seam.put.node))
    if rewrites_whole and isinstance(hit.node, ast.stmt) and not simple:
        _require_own_lines(seam, source, whole.start, whole.end)
    holes = _hole_texts(source, hit.bindings)
    return [Edit(seam, *one.splice, holes, whole, one.node) for one in rewrites]


def _is_compound(node: ast.AST | None) -> bool:
    return node is None or hasattr(node, "body") or isinstance(node, ast.Match)


def _require_own_lines(seam: Seam, source: Source, start: int, end: int) -> None:
    is_elif = source.raw[start : start + 4] == b"elif"
    if is_elif or not source.begins_line(start) or not source.ends_line(end):
        raise _shares_line(seam, source, start)


def _hole_texts(source: Source, bindings: Bindings) -> dict[str, str]:
    texts = {}
    for name, bound in bindings.items():
        nodes = bound if isinstance(bound, list) else [bound]
        texts[name] = ", ".join(
            node if isinstance(node, str) else source.text(source.span(node)) for node in nodes
        )
    return texts


# explanations --------------------------------------------------------------------------------


def _shares_line(seam: Seam, source: Source, offset: int) -> Misfit:
    return Misfit(
        Kind.BAD_PLACE,
        f'{source.path}:{source.line_number(offset)}: the anchor shares its line (elif, ";" or a '
        "one-line suite)",
        "anchor on the whole statement",
        line=seam.line,
    )


def _unfit(
    seam: Seam, source: Source, root: ast.AST, anchor: Pattern, hits: list[Match], times: int
) -> Misfit:
    if hits:
        lines = ", ".join(str(source.line_of(hit.node)) for hit in hits)
        headline = (
            f"{seam.scope}: {len(hits)} places read {anchor.text!r} (lines {lines}); "
            f"the seam names {times}"
        )
        return Misfit(Kind.AMBIGUOUS, headline, line=seam.line)
    headline = f"{seam.scope}: nothing reads {anchor.text!r}"

    def explain() -> Iterator[str]:
        yield from (f"nearest   {line}" for line in _nearest(source, root, anchor))
        yield from (f"elsewhere {line}" for line in _elsewhere(source, root, anchor))

    return Misfit(Kind.NO_ANCHOR, headline, line=seam.line, explain=explain)


def readers(pattern: Pattern, source: Source) -> Iterator[tuple[str, ast.AST]]:
    """All nodes of a file that read like `pattern`, with the definition they are in."""
    for name, statement in source.statements_with(pattern.rarest):
        if match(pattern, statement) is not None:
            yield name, statement
        yield from ((name, hit.node) for hit in find(pattern, source, statement))


def _nearest(source: Source, root: ast.AST, anchor: Pattern, most: int = 2) -> list[str]:
    """The places of the anchor's own kind whose text is most like it."""
    rated = []
    for node in source.nodes(root, type(anchor.node)):
        text = ast.unparse(node).partition("\n")[0]
        ratio = difflib.SequenceMatcher(None, anchor.text, text).ratio()
        rated.append((-ratio, source.line_of(node), text))
    return [
        f"{source.path}:{line}: {text[:100]}"
        for ratio, line, text in sorted(rated)[:most]
        if -ratio > NEAR_RATIO
    ]


def _elsewhere(source: Source, root: ast.AST, anchor: Pattern) -> list[str]:
    inside = {source.line_of(node) for node in source.nodes(root, type(anchor.node))}
    return [
        f"{source.path}:{source.line_of(node)}: {name} reads it"
        for name, node in readers(anchor, source)
        if source.line_of(node) not in inside
    ]
