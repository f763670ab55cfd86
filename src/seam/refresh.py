# SPDX-License-Identifier: Apache-2.0
"""Edits of a built tree on their way back: modules, tests, and the `+` lines of seam files."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, product

from seam.builttree import BuiltTree
from seam.errors import Misfit, SeamError
from seam.layer import SRT, Layer
from seam.pattern import hole_names
from seam.pieces import Piece, edited, pieces
from seam.plus import plain, rewritten
from seam.seamfile import Patch, Seam, parse
from seam.series import Series

MOST_TRIES = 16
"""Most ways of writing `+` lines that are tried together before an edit is given up."""


@dataclass(frozen=True)
class Rewrite:
    """A seam whose `+` lines change."""

    patch: Patch
    seam: Seam
    ways: tuple[str, ...]
    """How they may be written, best first."""
    place: str
    """Where the edit stands in the tree."""


@dataclass
class Refresh:
    """What goes back, all of it in memory, and what is to be said of it."""

    series: Series
    """The series with the rewritten seam files."""
    layer: Layer
    """That series over the tree's pristine commit: what the tree reads like."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Path in the repository to content."""
    remarks: list[str] = field(default_factory=list)


class Refused(SeamError):
    """Edits that cannot go back, each told in a block of text."""

    def __init__(self, reasons: Iterable[str], upstream: Iterable[str] = ()) -> None:
        super().__init__("\n".join(["nothing was written", *reasons]))
        self.upstream = tuple(upstream)
        """Files in which lines of upstream were edited."""


def refresh(series: Series, tree: BuiltTree) -> Refresh:
    """Find where every edit of `tree` belongs; raise `Refused` when one belongs nowhere."""
    patches = carried(series, tree)
    layer = lay(tree, patches, partial(tree.ours, series))
    ours = {path for patch in patches for path in patch.adds}
    files, reasons = _own_files(series, tree, ours)
    rewrites, upstream = [], []
    for path in tree.edited():
        if path in ours or path in files:
            continue
        try:
            seams = list(_rewrites(layer, tree, path))
        except SeamError as error:
            reasons.append(str(error))
            continue
        rewrites += [one for one in seams if one is not None]
        upstream += [path] if None in seams else []
    if reasons or upstream:
        raise Refused(reasons, upstream)
    if not rewrites:
        return Refresh(series, layer, files)
    found = _settle(series, tree, layer, rewrites)
    found.files |= files
    return found


def carried(series: Series, tree: BuiltTree) -> list[Patch]:
    """The patches of a tree as the series has them now, those it was asked to pull in too."""
    names = {stamp.patch for stamp in tree.stamps}
    gone = names - {patch.name for patch in series.patches}
    if gone:
        raise SeamError(
            f"{tree.folder} carries {', '.join(sorted(gone))}, which the series no longer has; "
            "build it anew elsewhere"
        )
    return series.select(sorted(names)).patches


def lay(tree: BuiltTree, patches: Iterable[Patch], overlay: Callable[[str], bytes]) -> Layer:
    """The series over the tree's pristine commit; `SeamError` when it does not fit there."""
    layer = Layer(tree.pristine, tree.release, overlay)
    layer.lay(patches)
    if layer.misfits:
        told = (misfit.report(patch.name, tree.release) for patch, misfit in layer.misfits)
        raise SeamError("\n".join(["the series does not fit; nothing was written", *told]))
    return layer


# files of ours -------------------------------------------------------------------------------


def _own_files(
    series: Series, tree: BuiltTree, ours: set[str]
) -> tuple[dict[str, bytes], list[str]]:
    """Modules and tests to copy back, and why some cannot be."""
    files: dict[str, bytes] = {}
    reasons = []
    for path in sorted(ours):
        here, built = tree.read(path), tree.built.read(path)
        file = series.root / path
        there = file.read_bytes() if file.is_file() else None
        if here is None and built is not None:
            reasons.append(f"{path} was deleted: take it out of the patch that adds it")
        elif here in (built, there) or here is None:
            continue
        elif there not in (built, None):
            reasons.append(f"{path} was changed both here and in the repository since; merge them")
        else:
            files[path] = here
    for path in tree.new():
        file = series.root / path
        copy = file.is_file() and file.read_bytes() == tree.read(path)
        if path not in ours and not copy:
            reasons.append(f"{path} is new: write 'adds {path}' in the patch that it belongs to")
    return files, reasons


# lines of ours -------------------------------------------------------------------------------


def _rewrites(layer: Layer, tree: BuiltTree, path: str) -> Iterator[Rewrite | None]:
    """The seams whose lines were edited in a file; None when a line of upstream was too."""
    built, now, laid = tree.built.read(path), tree.read(path), layer.read(path)
    if now is None:
        raise SeamError(f"{path} was deleted; the series deletes no file of upstream")
    if now == laid:
        return
    if built != laid:
        raise SeamError(
            f"{path} was edited here, and the series changed what it puts there since; build a "
            "tree anew elsewhere and make the edit again"
        )
    found = pieces(layer, path)
    mark = len(now) - len(now.removeprefix(b"\xef\xbb\xbf"))
    changes = edited(found, (laid or b"")[mark:], now[mark:])
    if changes is None:
        yield None
        return

    for at, text in changes.items():
        start, end = found[at].span
        yield _rewrite(found[at], (laid or b"")[mark:][start:end], text, path)


def _rewrite(piece: Piece, before: bytes, after: bytes, path: str) -> Rewrite:
    patch, seam = piece.patch, piece.edit.seam
    old, new = plain(piece, before), plain(piece, after)
    place = f"{patch.name}.seam:{seam.put_lines[0]} ({path.removeprefix(SRT)}, {seam.scope})"
    if not new.strip():
        raise SeamError(f"{place}: its lines were deleted; take the hunk out of the seam file")
    try:
        ways = rewritten(seam, piece.edit.holes, old, new)
    except Misfit as misfit:
        raise SeamError(f"{place}: {misfit}") from misfit
    return Rewrite(patch, seam, ways, place)


# seam files ----------------------------------------------------------------------------------


def _settle(series: Series, tree: BuiltTree, layer: Layer, rewrites: list[Rewrite]) -> Refresh:
    """Take the first ways of writing that give the very bytes of the tree."""
    groups: dict[tuple[str, tuple[int, int]], list[Rewrite]] = {}
    for one in rewrites:
        groups.setdefault((one.patch.name, one.seam.put_lines), []).append(one)
    choices = [_common(group) for group in groups.values()]
    last: SeamError | None = None
    for _, ways in zip(range(MOST_TRIES), product(*(one.ways for one in choices)), strict=False):
        try:
            found = _written(series, tree, layer, choices, ways)
        except SeamError as error:
            last = last or error
            continue
        differing = [path for path in tree.edited() if found.layer.read(path) != tree.read(path)]
        if not differing:
            return found
        places = [one.place for one in choices]
        last = last or SeamError(
            f"{differing[0]}: no '+' lines give exactly what stands there now; edit "
            f"{' or '.join(places)} by hand"
        )
    raise Refused([str(last)])


def _common(group: list[Rewrite]) -> Rewrite:
    """The ways that all places of one seam agree on."""
    first = group[0]
    ways = tuple(way for way in first.ways if all(way in other.ways for other in group[1:]))
    if not ways or len(group) < first.seam.times:
        raise Refused(
            [f"{first.place}: the seam stands at {first.seam.times} places; edit all of them alike"]
        )
    return replace(first, ways=ways)


def _written(
    series: Series,
    tree: BuiltTree,
    before: Layer,
    choices: list[Rewrite],
    ways: tuple[str, ...],
) -> Refresh:
    """The seam files with new `+` lines, parsed and laid again."""
    laid = {
        (result.patch.name, edit.seam.put_lines)
        for result in before.results.values()
        for file in result.files
        for edit in file.edits
    }
    files: dict[str, bytes] = {}
    remarks = []
    changed: dict[str, Patch] = {}
    for name, pairs in groupby(
        sorted(zip(choices, ways, strict=True), key=lambda pair: pair[0].patch.name),
        key=lambda pair: pair[0].patch.name,
    ):
        patch = series.patch(name)
        text = (series.root / "series" / f"{name}.seam").read_bytes().decode()
        new: dict[tuple[int, int], str] = {}
        for one, way in pairs:
            new[one.seam.put_lines] = way
            twins, left = _twins(patch, one.seam, way, laid)
            new |= {twin.put_lines: way for twin in twins}
            remarks += [f"{name}.seam:{seam.put_lines[0]}: {reason}" for seam, reason in left]
        rewritten_text = _with_plus_lines(text, new)
        files[f"series/{name}.seam"] = rewritten_text.encode()
        changed[name] = parse(name, rewritten_text)
        remarks += _told(name, text, rewritten_text)
    after = replace(series, patches=tuple(changed.get(p.name, p) for p in series.patches))
    again = [changed.get(name, result.patch) for name, result in before.results.items()]
    layer = lay(tree, again, before.overlay)
    return Refresh(after, layer, files, remarks)


def _twins(
    patch: Patch, seam: Seam, way: str, laid: set[tuple[str, tuple[int, int]]]
) -> tuple[list[Seam], list[tuple[Seam, str]]]:
    """The seams of other releases that have the same `+` lines, and those that cannot follow."""
    twins, left = [], []
    for other in patch.seams:
        if (patch.name, other.put_lines) in laid or other.put_lines == seam.put_lines:
            continue
        if other.put.text == seam.put.text:
            anchors = (*other.inside, *((other.anchor,) if other.anchor else ()))
            bound = {name for anchor in anchors for name in anchor.names}
            loose = hole_names(way) - bound
            if loose:
                left.append((other, f"left as it is, its anchor does not bind ${min(loose)}"))
            else:
                twins.append(other)
    for hunk in (hunk for file in patch.files for hunk in file.hunks):
        seams = [one for alternative in hunk.alternatives for one in alternative.seams]
        if any(one.put_lines == seam.put_lines for one in seams):
            left += [
                (one, "left as it is, an alternative with other '+' lines")
                for alternative in hunk.alternatives
                if all(one.put_lines != seam.put_lines for one in alternative.seams)
                and not any(one.put.text == seam.put.text for one in alternative.seams)
                for one in alternative.seams
            ]
    return twins, left


def _with_plus_lines(text: str, new: dict[tuple[int, int], str]) -> str:
    """A seam file with other `+` lines, by the first and last line they had."""
    lines = text.split("\n")
    end = "\r" if "\r\n" in text else ""
    for (first, last), way in sorted(new.items(), reverse=True):
        remarks = [line for line in lines[first - 1 : last] if line.startswith("#")]
        plus = [f"+ {line}".rstrip() + end for line in way.split("\n")]
        lines[first - 1 : last] = [*remarks, *plus]
    return "\n".join(lines)


def _told(name: str, before: str, after: str) -> Iterator[str]:
    old, new = before.splitlines(), after.splitlines()
    path = f"series/{name}.seam"
    yield "\n".join(difflib.unified_diff(old, new, path, path, n=1, lineterm=""))
