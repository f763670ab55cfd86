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

from seam.annotate import Origin, annotate
from seam.builttree import BuiltTree
from seam.drift import Sources, drift
from seam.refresh import refresh
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
    origin = verb(_annotate, "annotate", "say which patch and hunk put a line of a tree there")
    origin.add_argument("file", metavar="FILE[:LINE]", help="in a built tree or a checkout")
    changed = verb(_drift, "drift", "print what changed in the scopes that patches touch")
    changed.add_argument("old", metavar="OLD", help="a supported release")
    changed.add_argument("new", metavar="NEW", help="another one")
    changed.add_argument("patch", nargs="*", metavar="PATCH", help="only these")


def _refresh(again: Again, given: argparse.Namespace) -> int:
    series = Series.load()
    with BuiltTree(given.dir) as tree:
        found = refresh(series, tree)
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
