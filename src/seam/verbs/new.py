# SPDX-License-Identifier: Apache-2.0
"""A patch begun, empty or from the edits of a tree."""

from __future__ import annotations

import argparse

from seam.builttree import BuiltTree
from seam.newpatch import Proposer, empty, from_tree, refuse_name
from seam.refresh import carried, lay
from seam.seamfile import parse
from seam.series import Series, store


def run(given: argparse.Namespace) -> int:
    """Write the skeleton of a patch, or the patch that the edits of a tree make."""
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
