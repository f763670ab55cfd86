# SPDX-License-Identifier: Apache-2.0
"""A patch to be, empty or as the edits of a built tree ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from packaging.version import Version

from seam.builttree import BuiltTree
from seam.changes import Change, changes
from seam.drift import Sources
from seam.errors import Misfit, SeamError
from seam.layer import SRT, Layer
from seam.pieces import pieces
from seam.propose import Proposal, propose
from seam.seamfile import NAME, parse
from seam.series import Series
from seam.skeleton import message, skeleton_files
from seam.source import Source
from seam.wheels import Wheel

SHOWN = 3
"""Most proposals that are told of one change."""
AREAS = {"disaggregation": "disagg"}


@dataclass(frozen=True)
class Proposed:
    """A change of upstream's lines and the hunks that would make it, the best first."""

    place: str
    change: Change
    proposals: list[Proposal]

    @property
    def told(self) -> str:
        """The place and the best proposals, as they would stand in a seam file."""
        if not self.proposals:
            reason = self.change.fault or "no anchor names it; move it into a module of ours"
            return f"{self.place}: no seam makes this change: {reason}"
        lines = [f"{self.place}: a line of upstream was edited; a seam for it may be"]
        for one in self.proposals[:SHOWN]:
            lines.append(f"  fits {len(one.releases)} releases")
            lines += [f"    {line}" for line in one.hunk.rstrip().split("\n")]
        return "\n".join(lines)


class Proposer:
    """Proposes seams for the edited files of a tree; every release is opened once."""

    def __init__(self, series: Series, layer: Layer, tree: BuiltTree) -> None:
        self.series = series
        self.layer = layer
        self.tree = tree
        self._open = ExitStack()
        self._releases = [
            (release.name, Sources(release, self._open.enter_context(Wheel(release))))
            for release in series.releases.values()
        ]

    def file(self, path: str) -> Iterator[Proposed]:
        """The changes of upstream's lines in a file, edits of our own lines left out."""
        name = path.removeprefix(SRT)
        laid, now = self.layer.read(path), self.tree.read(path)
        pristine = self.tree.pristine.read(path)
        if pristine is None or laid is None or now is None or not path.startswith(SRT):
            raise SeamError(f"{path}: a seam changes Python files under {SRT} only")
        try:
            old, new, base = Source(laid, name), Source(now, name), Source(pristine, name)
            found = changes(old, new)
        except Misfit as misfit:
            raise SeamError(f"{path}: {misfit}") from misfit
        ours = pieces(self.layer, path)
        for change in found:
            low, high = change.span(old)
            touched = [one for one in ours if one.span.start < high and low < one.span.end]
            if any(one.span.start <= low and high <= one.span.end for one in touched):
                continue
            if touched:
                fault = f"it takes in lines of {touched[0].patch.name}"
                change = replace(change, fault=fault)
            proposals = propose(change, old, new, base, self.paths(name), self._releases)
            place = f"{name}:{old.line_number(low)} {change.scope}".rstrip()
            yield Proposed(place, change, proposals)

    def paths(self, name: str) -> str:
        """The names of a file in all releases, if a patch knows them, as a seam file has them."""
        for patch in self.series.patches:
            for file in patch.files:
                if name in file.paths:
                    return " | ".join(file.paths)
        return name

    def __enter__(self) -> Proposer:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


@dataclass
class NewPatch:
    """A patch that is not in the series yet, and the files it comes with."""

    name: str
    adds: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    """Path in the repository to content, those that it adds."""
    hunks: dict[str, list[Proposal]] = field(default_factory=dict)
    """By the names of their file."""
    releases: str = ""

    @property
    def seam(self) -> str:
        """The seam file; its message is a skeleton."""
        folder = PurePosixPath(next(iter(self.hunks), "disaggregation/")).parts[0]
        area = AREAS.get(folder, folder)
        head = [f"releases: {self.releases}"] if self.releases else []
        head += [f"adds {path}" for path in self.adds]
        sections = ["\n".join(head)] if head else []
        for paths, proposals in self.hunks.items():
            order = sorted(proposals, key=lambda one: not one.hunk.startswith("@@ import"))
            sections.append("\n".join([f"+++ {paths}", "\n".join(one.hunk for one in order)]))
        body = "\n\n".join(section.rstrip() for section in sections)
        return f"{message(area, self.name)}{body}\n"

    def in_series(self, series: Series) -> dict[str, bytes]:
        """All files to write, the order with the patch at its end among them."""
        parse(self.name, self.seam)
        order = (series.root / "series" / "series").read_text()
        listed = order + ("" if order.endswith("\n") else "\n") + f"{self.name}\n"
        seam = {f"series/{self.name}.seam": self.seam.encode()}
        return self.files | seam | {"series/series": listed.encode()}


def refuse_name(series: Series, name: str) -> None:
    """Raise `SeamError` when no new patch can be called so."""
    if not NAME.fullmatch(name):
        raise SeamError(f"{name!r} is no name of a patch (a-z, 0-9, -)")
    if (series.root / "series" / f"{name}.seam").exists():
        raise SeamError(f"there is a series/{name}.seam already")


def empty(name: str) -> NewPatch:
    """A patch that adds an empty module and a test that waits to be written."""
    files = skeleton_files(name)
    return NewPatch(name, [*files], files)


def from_tree(name: str, series: Series, tree: BuiltTree, proposer: Proposer) -> NewPatch:
    """The patch that the edits of upstream's lines and the new files of a tree make.

    Raises `SeamError`, with every proposal, when a change can be made by no seam.
    """
    found = NewPatch(name)
    ours = {path for patch in series.patches for path in patch.adds}
    for path in tree.new():
        if path not in ours:
            found.adds.append(path)
            found.files[path] = tree.read(path) or b""
    faults = []
    for path in tree.edited():
        for proposed in proposer.file(path) if path not in ours else ():
            if not proposed.proposals:
                faults.append(proposed.told)
                continue
            paths = proposer.paths(path.removeprefix(SRT))
            found.hunks.setdefault(paths, []).append(proposed.proposals[0])
    if faults:
        raise SeamError("\n".join(["nothing was written", *faults]))
    if not found.adds and not found.hunks:
        raise SeamError(f"{tree.folder} has no edit of upstream's lines and no new file")
    chosen = [one.releases for hunks in found.hunks.values() for one in hunks]
    found.releases = _range(list(series.releases), chosen, tree.release)
    return found


def _range(names: Sequence[str], chosen: Sequence[frozenset[str]], release: str) -> str:
    """The releases around `release` that all hunks fit, as a seam file says it; empty for all."""
    fits = [all(name in one for one in chosen) for name in names]
    first = last = names.index(release)
    while first > 0 and fits[first - 1]:
        first -= 1
    while last < len(names) - 1 and fits[last + 1]:
        last += 1
    low = str(Version(names[first])) if first else ""
    high = str(Version(names[last])) if last < len(names) - 1 else ""
    return f"{low} .. {high}".strip() if low or high else ""
