# SPDX-License-Identifier: Apache-2.0
"""The edits of a built tree, taken back into the series."""

from __future__ import annotations

import argparse

from seam.builttree import BuiltTree
from seam.errors import SeamError
from seam.newpatch import Proposer
from seam.refresh import Refused, carried, lay, refresh
from seam.series import Series, store
from seam.verbs.check import check


def run(given: argparse.Namespace) -> int:
    """Take all edits back, or none, and check the series."""
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
    return check(Series.load())


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
