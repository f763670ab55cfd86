# SPDX-License-Identifier: Apache-2.0
"""One file under one patch: its hunks laid, and the result verified."""

from __future__ import annotations

from dataclasses import dataclass

from seam.errors import Kind, Misfit
from seam.pattern import reads_alike
from seam.resolve import Edit, HunkResult, Standing, readers, resolve_hunk, standing
from seam.seamfile import IMPORT_SCOPE, FilePatch
from seam.source import Source, Span, Splice


@dataclass(frozen=True)
class FileResult:
    """A file after one patch."""

    patch: FilePatch
    before: Source
    after: Source
    hunks: tuple[HunkResult, ...]
    edits: tuple[Edit, ...]
    spans: tuple[Span, ...]
    """Where each edit stands in `after`."""

    @property
    def lines(self) -> list[str]:
        """The lines of `after` that the edits produced."""
        return [line for span in self.spans for line in self.after.lines_of(span)]


def resolve_file(file: FilePatch, current: Source, pristine: Source) -> FileResult:
    """Resolve all hunks of a file patch in `current`; raise `Misfit` when one does not fit.

    `pristine` is the file without this series, see `resolve_hunk`.
    """
    others = [resolve_hunk(hunk, current, pristine) for hunk in file.hunks if not hunk.is_import]
    wanted = not others or any(result.standing is Standing.APPLIED for result in others)
    results = []
    for hunk in file.hunks:
        if not hunk.is_import:
            results.append(others.pop(0))
        elif wanted:
            results.append(resolve_hunk(hunk, current, pristine))
    edits = tuple(edit for result in results for edit in result.edits)
    if not edits:
        return FileResult(file, current, current, tuple(results), (), ())
    splices = [Splice(edit.span, edit.text) for edit in edits]
    content, spans = current.splice(splices)
    after = Source(content, current.path, (current, splices))
    result = FileResult(file, current, after, tuple(results), edits, tuple(spans))
    _verify(result)
    return result


def check_forbidden(file: FilePatch, after: Source) -> None:
    """Raise `Misfit` (left-over) when something still reads what the patch forbids."""
    for pattern, line in file.forbidden:
        for name, node in readers(pattern, after):
            place = f"{after.path}:{after.line_of(node)}"
            raise Misfit(
                Kind.LEFT_OVER,
                f"after the patch {place} {name} still reads {pattern.text!r}",
                line=line,
            )


# verification --------------------------------------------------------------------------------


def _verify(result: FileResult) -> None:
    """Every edit must read in the result as its seam says, and be found present by a second run."""
    for edit, span in zip(result.edits, result.spans, strict=True):
        if edit.seam.scope != IMPORT_SCOPE:  # whole lines between whole statements
            _check(edit, span, result.after)


def _check(edit: Edit, span: Span, after: Source) -> None:
    try:
        fine = _stands(edit, span, after)
    except Misfit as error:
        raise Misfit(Kind.BROKEN, f"after the patch {error}", line=edit.seam.line) from error
    if not fine:
        raise Misfit(
            Kind.BROKEN,
            f"{edit.seam.scope}: the result does not read like {edit.seam.put.text!r}",
            "an operator may bind more tightly there; put the '+' expression in parentheses",
            line=edit.seam.line,
        )


def moved(result: FileResult, offset: int, at_once: bool) -> int:
    """Where an offset of the old file is in the new one; insertions there count if `at_once`."""
    edits = [edit for edit in result.edits if edit.span.end < offset or (
        edit.span.end == offset and (at_once or edit.span.start < offset))]  # fmt: skip
    return offset + sum(len(edit.text) - (edit.span.end - edit.span.start) for edit in edits)


def _stands(edit: Edit, span: Span, source: Source) -> bool:
    """Whether an edit is present in `source`, parsed as the one node it is meant to be."""
    if standing(edit.seam, source) is not Standing.PRESENT:
        return False
    if edit.node is None:
        return True
    low, high = span
    for node in source.nodes(source.scope(edit.seam.scope), type(edit.node)):
        start, end = source.span(node)
        inside = low <= start and end <= high
        around = source.raw[low:start].strip(b"( \t\r\n") + source.raw[end:high].strip(b") \t\r\n")
        if inside and not around and reads_alike(node, edit.node):
            return True
    return False
