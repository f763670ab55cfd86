# SPDX-License-Identifier: Apache-2.0
"""What upstream changed from one release to another inside the scopes that the series touches."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from seam.errors import Kind, Misfit
from seam.layer import SRT, Pristine
from seam.seamfile import FilePatch, Hunk, Patch
from seam.series import Release
from seam.source import Source


@dataclass(frozen=True)
class Place:
    """A scope in one release: where it is and how it reads."""

    path: str
    scope: str
    line: int
    text: str

    @property
    def name(self) -> str:
        """The file and the scope."""
        return f"{self.path} {self.scope}"


@dataclass(frozen=True)
class Drift:
    """A scope that a patch touches and that reads otherwise in the other release."""

    patch: str
    old: Place | None
    """None where only the new release has it."""
    new: Place | None
    """None where only the old release has it."""

    @property
    def lines(self) -> list[str]:
        """The unified diff, numbered as the two files are; empty when one release lacks it."""
        if self.old is None or self.new is None:
            return []
        old, new = self.old.text.splitlines(), self.new.text.splitlines()
        body = [*difflib.unified_diff(old, new, lineterm="")][2:]
        return [_renumbered(line, self.old.line - 1, self.new.line - 1) for line in body]

    @property
    def title(self) -> str:
        """The place, the one it moved to if it did, and how many lines came and went."""
        if self.old is None or self.new is None:
            place = self.old or self.new
            assert place is not None
            lines = len(place.text.splitlines())
            return f"{place.name}: {'new' if self.new else 'gone'}, {lines} lines"
        moved = f" -> {self.new.name}" if self.new.name != self.old.name else ""
        marks = [line[0] for line in self.lines]
        return f"{self.old.name}{moved}  +{marks.count('+')} -{marks.count('-')}"


class Sources:
    """The parsed files of one release, each read once."""

    def __init__(self, release: Release, pristine: Pristine) -> None:
        self.version = release.version
        self._pristine = pristine
        self._read: dict[str, Source | None] = {}

    def get(self, path: str) -> Source | None:
        """A file under python/sglang/srt, None when the release has none of that name."""
        if path not in self._read:
            content = self._pristine.read(SRT + path)
            self._read[path] = None if content is None else Source(content, path)
        return self._read[path]


def drift(patches: Iterable[Patch], old: Sources, new: Sources) -> Iterator[Drift]:
    """Every touched scope that the two releases do not share, patch by patch, each once."""
    for patch in patches:
        seen = set()
        for file, hunk in _hunks(patch, old, new):
            pair = _place(file, hunk, old), _place(file, hunk, new)
            if pair not in seen and _text(pair[0]) != _text(pair[1]):
                yield Drift(patch.name, *pair)
            seen.add(pair)


def _hunks(patch: Patch, *releases: Sources) -> Iterator[tuple[FilePatch, Hunk]]:
    """The hunks that are for one of the releases at least."""
    for file in patch.files:
        if any(one.version in patch.releases and one.version in file.releases for one in releases):
            yield from ((file, hunk) for hunk in file.hunks if not hunk.is_import)


def _place(file: FilePatch, hunk: Hunk, sources: Sources) -> Place | None:
    """The first scope of a hunk that the release has."""
    source = next(filter(None, map(sources.get, file.paths)), None)
    for alternative in hunk.alternatives if source else ():
        assert source is not None
        try:
            node = source.scope(alternative.scope)
        except Misfit as misfit:
            if misfit.kind is not Kind.NO_SCOPE:
                raise
            continue
        start = source.line_start(source.statement_start(node))
        text = source.raw[start : source.span(node).end].decode()
        return Place(source.path, alternative.scope, source.line_number(start), text)
    return None


def _text(place: Place | None) -> str | None:
    return place.text if place else None


def _renumbered(line: str, *starts: int) -> str:
    """A line of a diff; a hunk's head counts from the start of the file, not of the scope."""
    if not line.startswith("@@"):
        return line
    spans = []
    for word, start in zip(line.split()[1:3], starts, strict=True):
        first, comma, count = word[1:].partition(",")
        spans.append(f"{word[0]}{int(first) + start}{comma}{count}")
    return f"@@ {' '.join(spans)} @@"
