# SPDX-License-Identifier: Apache-2.0
"""One commit per patch on a new branch of an SGLang checkout."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from seam import tree
from seam.checkout import Checkout
from seam.errors import SeamError
from seam.layer import Layer
from seam.series import Selection, Series
from seam.takeout import TakenOut
from seam.verbs.laid import lay, print_outcomes


def run(given: argparse.Namespace) -> int:
    """Lay the patches on a commit of a checkout, all of them or none."""
    series = Series.load()
    asked = series.release(given.release).name if given.release else None
    selection = series.select(given.patch)
    with Checkout(given.checkout, given.onto) as checkout:
        branch = given.branch or f"pd-series/{checkout.label}"
        ground = TakenOut(checkout) if given.replace else None
        carried = [] if ground else checkout.carried()
        there = [stamp.patch for stamp in carried]
        _refuse_carried(selection, there, checkout.label)
        if checkout.repository.has_branch(branch):
            raise SeamError(f"there is a branch {branch} already; choose another: --branch NAME")
        release = asked or checkout.release()
        layer = Layer(ground or checkout, release, series.overlay, carried)
        lay(layer, [patch for patch in selection.patches if patch.name not in there])
        commits = tree.commits(layer, checkout.timestamp)
        if ground:
            commits = ground.below(commits, layer.read)
        head = checkout.repository.write(branch, commits, checkout.commit) if commits else ""
    for remark in selection.remarks(there):
        print(remark)
    if ground and commits and ground.patches:
        print(f"taken out first: {', '.join(ground.patches)}")
    print_outcomes(layer)
    if release not in series.releases:
        print(f"{release} is not one of the supported releases, but everything found its place")
    if head:
        print(f"{branch} is {head[:10]}: {len(commits)} commits on {checkout.label} ({release})")
    else:
        print(f"nothing to do on {checkout.label} ({release}); no branch was made")
    return 0


def _refuse_carried(selection: Selection, there: Sequence[str], commit: str) -> None:
    again = [patch.name for patch in selection.patches if patch.name in there]
    again = [name for name in again if name not in selection.pulled]
    if again:
        raise SeamError(
            f"{commit} carries already: {', '.join(again)}; name the patches you want besides, "
            "lay this series in their place: --replace, or name a commit below them: --onto REF"
        )
