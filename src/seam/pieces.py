# SPDX-License-Identifier: Apache-2.0
"""A laid file as pieces: upstream's bytes, and between them what each seam put there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from seam.filelayer import FileResult, moved
from seam.layer import SRT, Layer
from seam.resolve import Edit
from seam.seamfile import Op, Patch
from seam.source import Span


@dataclass(frozen=True)
class Piece:
    """One place of a seam in a laid file: what reads like its `+` lines there."""

    patch: Patch
    edit: Edit
    """The first of the edits that the seam made there."""
    indent: bytes
    """White space that each line but perhaps the first has on top of what `+` lines have."""
    span: Span
    """Where it is once all patches are laid, counted without a byte order mark."""


def pieces(layer: Layer, path: str) -> list[Piece]:
    """What the seams put into a file, in order; `path` is as in a checkout.

    Where a patch rewrites what another put there, the two are left out: neither owns it alone.
    """
    found: list[Piece] = []
    for result in layer.results.values():
        for file in result.files:
            if SRT + file.after.path == path:
                found = [replace(piece, span=_later(file, piece.span)) for piece in found]
                found += _put(result.patch, file)
    found.sort(key=lambda piece: piece.span)
    nested = {id(p) for a, b in pairwise(found) if b.span.start < a.span.end for p in (a, b)}
    return [piece for piece in found if id(piece) not in nested]


def _put(patch: Patch, file: FileResult) -> Iterator[Piece]:
    """The places of one patch right after it was laid."""
    pairs = sorted(zip(file.edits, file.spans, strict=True), key=lambda pair: pair[1])
    for _, group in groupby(pairs, lambda pair: (pair[0].seam.put_lines, pair[0].whole)):
        edits, spans = zip(*group, strict=True)
        edit: Edit = edits[0]
        if edit.seam.op is not Op.REPLACE:
            indent = re.match(rb"[\r\n]*([ \t]*)", edit.text)
            yield Piece(patch, edit, indent[1] if indent else b"", spans[0])
            continue
        # The body of a statement whose head is replaced is not the seam's.
        hull = Span(spans[0].start, spans[-1].end)
        whole = hull if edit.seam.put.is_head else _later(file, edit.whole)
        yield Piece(patch, edit, file.before.indent(edit.whole.start), whole)


def _later(file: FileResult, span: Span) -> Span:
    """A span of the file before, in the file after; what is inserted at either end is not in it."""
    start = moved(file, span.start, at_once=True)
    return Span(start, max(start, moved(file, span.end, at_once=False)))


def edited(found: list[Piece], laid: bytes, now: bytes) -> dict[int, bytes] | None:
    """What stands in the place of each piece that was edited, by its index in `found`.

    None when a byte between the pieces differs, so that not only ours was edited.
    """
    ends = [0, *(piece.span.end for piece in found)]
    starts = [*(piece.span.start for piece in found), len(laid)]
    gaps = [laid[a:b] for a, b in zip(ends, starts, strict=True)]
    if not now.startswith(gaps[0]) or (not found and now != laid):
        return None
    texts = list(_between(found, gaps, laid, now))
    if len(texts) != len(found):
        return None
    return {
        at: text
        for at, (piece, text) in enumerate(zip(found, texts, strict=True))
        if text != laid[piece.span.start : piece.span.end]
    }


def _between(found: list[Piece], gaps: list[bytes], laid: bytes, now: bytes) -> Iterator[bytes]:
    """The text in the place of each piece; fewer when a gap is not found any more."""
    same = [laid[piece.span.start : piece.span.end] for piece in found]
    at, last = len(gaps[0]), len(found) - 1
    for number, gap in enumerate(gaps[1:]):
        if number == last:
            end = len(now) - len(gap)
            if end < at or not now.endswith(gap):
                return
        else:
            # The next piece is a landmark too, as long as it was not edited itself.
            mark = gap + same[number + 1] + gaps[number + 2]
            kept = now.startswith(same[number] + mark, at)
            end = at + len(same[number]) if kept else now.find(mark, at)
            if end < 0 and now.startswith(same[number] + gap, at):
                end = at + len(same[number])
            if end < 0 and gap:
                end = now.find(gap, at)
            if end < 0:
                return
        yield now[at:end]
        at = end + len(gap)
