# SPDX-License-Identifier: Apache-2.0
"""The verbs of whoever maintains the series, and what they print."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from packaging.version import InvalidVersion, Version

from seam import wheels
from seam.annotate import Origin, annotate
from seam.builttree import BuiltTree
from seam.drift import Sources, drift
from seam.errors import SeamError
from seam.newpatch import Proposer, empty, from_tree, refuse_name
from seam.newrelease import read_entry, steps, with_entry
from seam.refresh import Refused, carried, lay, refresh
from seam.seamfile import parse
from seam.series import Series, store
from seam.wheels import Wheel

Run: TypeAlias = Callable[[argparse.Namespace], int]
AddVerb: TypeAlias = Callable[[Run, str, str], argparse.ArgumentParser]
Again: TypeAlias = Callable[[Sequence[str]], int]
"""Runs another verb, given as on the command line; returns its exit status."""


def register(verb: AddVerb, again: Again) -> None:
    """Add the verbs to the command line."""
    does = "take the edits of a built tree back into the series, and check it on all releases"
    back = verb(partial(_refresh, again), "refresh", does)
    back.add_argument("dir", metavar="DIR", type=Path, help="a tree that seam built")
    begin = verb(_new, "new", "begin a patch, empty or from the edits of a tree")
    begin.add_argument("name", metavar="NAME")
    begin.add_argument("--from", dest="dir", metavar="DIR", type=Path, help="an edited built tree")
    origin = verb(_annotate, "annotate", "say which patch and hunk put a line of a tree there")
    origin.add_argument("file", metavar="FILE[:LINE]", help="in a built tree or a checkout")
    does = "add a release to the supported ones, and say what is left to do for it"
    release = verb(_release, "release", does)
    release.add_argument("version", metavar="VERSION")
    changed = verb(_drift, "drift", "print what changed in the scopes that patches touch")
    changed.add_argument("old", metavar="OLD", help="a supported release")
    changed.add_argument("new", metavar="NEW", help="another one")
    changed.add_argument("patch", nargs="*", metavar="PATCH", help="only these")


def _refresh(again: Again, given: argparse.Namespace) -> int:
    series = Series.load()
    with BuiltTree(given.dir) as tree:
        try:
            found = refresh(series, tree)
        except Refused as refused:
            raise _with_proposals(refused, series, tree) from refused
        store(series.root, found.files)
        tree.relay(found.layer)
    for path in found.files:
        print(f"written  {path}")
    for remark in found.remarks:
        print(remark)
    if not found.files:
        print(f"{given.dir} has no edits")
        return 0
    return again(["check"])


def _with_proposals(refused: Refused, series: Series, tree: BuiltTree) -> SeamError:
    """The refusal, with anchors for what was edited of upstream."""
    told = [str(refused)]
    if refused.upstream:
        layer = lay(tree, carried(series, tree), series.overlay)
        with Proposer(series, layer, tree) as proposer:
            for path in refused.upstream:
                found = [one.told for one in proposer.file(path)]
                told += found or [f"{path}: layout or comments of upstream's lines were edited"]
        told.append(f"a patch of its own: seam new NAME --from {tree.folder}")
    return SeamError("\n".join(told))


def _new(given: argparse.Namespace) -> int:
    series = Series.load()
    refuse_name(series, given.name)
    if given.dir is None:
        patch = empty(given.name)
        store(series.root, patch.in_series(series))
    else:
        with BuiltTree(given.dir) as tree:
            patches = carried(series, tree)
            with Proposer(series, lay(tree, patches, series.overlay), tree) as proposer:
                patch = from_tree(given.name, series, tree, proposer)
            files = patch.in_series(series)
            more = [*patches, parse(patch.name, patch.seam)]
            layer = lay(tree, more, lambda path: files.get(path) or series.overlay(path))
            store(series.root, files)
            tree.order_imports(layer)
            tree.relay(layer)
        print(patch.seam.partition("---\n")[2])
    for path in patch.in_series(series):
        print(f"written  {path}")
    print("now fill in its message; `seam check` says what is left")
    return 0


MARKS = {True: "x", False: " ", None: "?"}
"""How a step stands; only a person can tell whether one marked ? is done."""


def _release(given: argparse.Namespace) -> int:
    series = Series.load()
    try:
        version = str(Version(given.version))
    except InvalidVersion as error:
        raise SeamError(f"{given.version!r} is no version: want one like 0.5.24") from error
    if version not in series.releases:
        entry = read_entry(wheels.find(version, series.newest), series.newest)
        path = "series/releases.toml"
        text = with_entry((series.root / path).read_text(), entry)
        store(series.root, {path: text.encode()})
        print(f"written  {path}; compare its sha256 with the one that the publisher shows")
        for remark in entry.remarks:
            print(f"{'':<9}{remark}")
        series = Series.load(series.root)
    found = steps(series, series.release(version))
    for step in found:
        print(f"[{MARKS[step.done]}] {step.name:<8}{step.told}")
        for line in step.detail.splitlines():
            print(f"{'':<12}{line}".rstrip())
    return int(any(step.done is False for step in found))


def _drift(given: argparse.Namespace) -> int:
    series = Series.load()
    old, new = series.release(given.old), series.release(given.new)
    patches = [series.patch(name) for name in given.patch] or series.patches
    seen: dict[tuple[str, ...], str] = {}
    with Wheel(old) as before, Wheel(new) as after:
        for one in drift(patches, Sources(old, before), Sources(new, after)):
            first = seen.setdefault(tuple(one.lines), one.patch) if one.lines else one.patch
            above = "" if first == one.patch else f"  (printed above, under {first})"
            print(f"{one.patch}: {one.title}{above}")
            for line in () if above else one.lines:
                print(line)
            print()
    if not seen:
        print(f"nothing that the patches touch changed from {old.name} to {new.name}")
    return 0


def _annotate(given: argparse.Namespace) -> int:
    found = re.fullmatch(r"(?P<file>.*?)(?::(?P<line>[1-9]\d*))?", given.file)
    assert found is not None
    line = int(found["line"]) if found["line"] else None
    origins = annotate(Series.load(), Path(found["file"]), line)
    for key, run in groupby(origins, lambda one: (one.owner, one.seam_line, one.note)):
        ours = [*run]
        if line or key[0] or key[2]:
            print(f"{_lines(ours)}: {_origin(ours[0])}")
            for one in ours if line or key[1] else ():
                print(f"    {one.text.strip()}".rstrip())
    return 0


def _lines(run: list[Origin]) -> str:
    first, last = run[0].number, run[-1].number
    return f"{first}" if first == last else f"{first}-{last}"


def _origin(one: Origin) -> str:
    place = f" series/{one.owner}.seam:{one.seam_line}" if one.seam_line else ""
    note = f" ({one.note})" if one.note else ""
    return f"{one.owner or 'not of the series'}{place}{note}"
