# SPDX-License-Identifier: Apache-2.0
"""What changed between two releases in the scopes that patches touch."""

from __future__ import annotations

import argparse

from seam.drift import Sources, drift
from seam.series import Series
from seam.wheels import Wheel


def run(given: argparse.Namespace) -> int:
    """Print each change once, under the first patch that it concerns."""
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
