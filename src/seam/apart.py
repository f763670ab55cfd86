# SPDX-License-Identifier: Apache-2.0
"""Whether the patches of a series lean on each other more than their `needs:` lines say.

Two things are asked of each patch on a release: that it fits with nothing but the patches it
needs, and that a line of upstream stands between its edits and those of any patch it does not
need, so that git can pick or revert either without the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from seam.errors import Kind, Misfit
from seam.filelayer import FileResult, check_forbidden, resolve_file
from seam.layer import PatchResult
from seam.resolve import Edit, readers
from seam.seamfile import FilePatch
from seam.source import Source, Span

Results = Mapping[str, PatchResult]
"""What became of each patch on a release, in order of application."""


def leaning(results: Results) -> dict[str, list[Misfit]]:
    """By patch, everything in which it leans on one that it does not need."""
    alone, touching = _Alone(results), _Touching(results)
    found = {
        name: [*alone.misfits(result), *touching.misfits(result)]
        for name, result in results.items()
    }
    return {name: misfits for name, misfits in found.items() if misfits}


def needed(results: Results, name: str) -> list[str]:
    """All patches that a patch needs, directly or not, in order of application."""
    direct = results[name].patch.needs
    below = {one for need in direct if need in results for one in [need, *needed(results, need)]}
    return [one for one in results if one in below]


# each patch with only what it needs ----------------------------------------------------------


class _Alone:
    """Lays a patch over files that only the patches it needs have touched."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self._laid: dict[tuple[str, int], tuple[Source, FileResult]] = {}
        self._pristine: dict[str, Source] = {}
        for result in results.values():
            for file in result.files:
                self._pristine.setdefault(file.before.path, file.before)

    def misfits(self, result: PatchResult) -> Iterator[Misfit]:
        for file in result.files:
            try:
                self._check(result, file)
            except Misfit as misfit:
                others = ", ".join(self._others(result, file))
                headline = f"without {others}, which it does not need: {misfit.headline}"
                yield Misfit(
                    misfit.kind,
                    headline,
                    *misfit.lines[1:],
                    "name the one that it leans on: 'needs: NAME'",
                    line=misfit.line,
                )

    def _check(self, result: PatchResult, file: FileResult) -> None:
        before = self._pristine[file.before.path]
        for need in needed(self.results, result.patch.name):
            for lent in self.results[need].files:
                if lent.before.path == file.before.path:
                    before = self._lay(need, lent.patch, before).after
        if before is not file.before:  # else it was laid so already
            laid = self._lay(result.patch.name, file.patch, before)
            if _may_leave(laid):
                check_forbidden(file.patch, laid.after)

    def _lay(self, name: str, patch: FilePatch, before: Source) -> FileResult:
        """The file after one patch; patches that need the same one share what it made."""
        for file in self.results[name].files:
            if file.before is before:
                return file
        key = (name, id(before))
        if key not in self._laid:
            laid = resolve_file(patch, before, self._pristine[before.path])
            self._laid[key] = (before, laid)
        return self._laid[key][1]

    def _others(self, result: PatchResult, file: FileResult) -> Iterator[str]:
        name, path = result.patch.name, file.before.path
        known = {name, *needed(self.results, name)}
        for other in self.results.values():
            if other.patch.name == name:
                return
            if other.patch.name not in known and any(f.before.path == path for f in other.files):
                yield other.patch.name


def _may_leave(file: FileResult) -> bool:
    """Whether something that the patch forbids stood where it edits nothing.

    Asked of the file before, which is parsed already; the file after must be parsed to be sure.
    """
    hits = (
        node for pattern, _ in file.patch.forbidden for _, node in readers(pattern, file.before)
    )
    spans = (file.before.span(node) for node in hits)
    edits = [edit.span for edit in file.edits]
    return any(
        all(edit.end < span.start or span.end < edit.start for edit in edits) for span in spans
    )


# patches whose edits touch -------------------------------------------------------------------


class _Claim(NamedTuple):
    """Lines of a file, as it is by now, that a patch put there."""

    patch: str
    lines: Span


class _Change(NamedTuple):
    """Lines of a file that an edit rewrites, and how many more it leaves; an insertion has none."""

    edit: Edit
    lines: Span
    growth: int


class _Touching:
    """Follows the lines of each patch through the files as later patches change them."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self._claims: dict[str, list[_Claim]] = {}

    def misfits(self, result: PatchResult) -> Iterator[Misfit]:
        """What the patch touches; its own lines are followed from here on."""
        name = result.patch.name
        known = {name, *needed(self.results, name)}
        for file in result.files:
            changes = [_change(edit, file.before) for edit in file.edits]
            claims = self._claims.get(file.before.path, [])
            strange = [claim for claim in claims if claim.patch not in known]
            yield from (_touches(file.before, *pair) for pair in _meetings(changes, strange))
            self._claims[file.before.path] = [
                *(_Claim(claim.patch, _moved(claim.lines, changes)) for claim in claims),
                *(_Claim(name, _lines(span, file.after)) for span in file.spans),
            ]


def _meetings(
    changes: Iterable[_Change], claims: Iterable[_Claim]
) -> Iterator[tuple[_Change, _Claim]]:
    """Changes that leave no line of the file between themselves and a claim."""
    for change in changes:
        for claim in claims:
            (first, last), (start, end) = change.lines, claim.lines
            if first <= end and start <= last:
                yield change, claim
                break


def _touches(source: Source, change: _Change, claim: _Claim) -> Misfit:
    place = f"{source.path}:{change.lines.start + 1} ({change.edit.seam.scope})"
    return Misfit(
        Kind.OVERLAP,
        f"edits {place}, where no line of upstream parts it from {claim.patch}",
        f"git takes neither without the other: hook in elsewhere, or say 'needs: {claim.patch}'",
        line=change.edit.seam.line,
    )


def _change(edit: Edit, source: Source) -> _Change:
    start, end = edit.span
    growth = edit.text.count(b"\n") - source.raw.count(b"\n", start, end)
    if start == end and source.begins_line(start) and edit.text.endswith((b"\n", b"\r")):
        line = source.line_number(start) - 1
        return _Change(edit, Span(line, line), growth)
    return _Change(edit, _lines(edit.span, source), growth)


def _lines(span: Span, source: Source) -> Span:
    """The lines that a span touches, counted from 0."""
    last = max(span.start, span.end - 1)
    return Span(source.line_number(span.start) - 1, source.line_number(last))


def _moved(lines: Span, changes: Iterable[_Change]) -> Span:
    """Where lines of the old file are in the new one, with what was put among them."""
    above = [change for change in changes if change.lines.end <= lines.start]
    among = [c for c in changes if c.lines.end > lines.start and c.lines.start < lines.end]
    start = lines.start + sum(change.growth for change in above)
    return Span(start, start + len(range(*lines)) + sum(change.growth for change in among))
