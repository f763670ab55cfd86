# SPDX-License-Identifier: Apache-2.0
"""A patched copy of the package."""

from __future__ import annotations

import argparse

from seam import tree
from seam.installed import Installed
from seam.layer import Layer
from seam.progress import progress
from seam.series import Release, Series
from seam.verbs.laid import lay, print_outcomes
from seam.wheels import Wheel


def run(given: argparse.Namespace) -> int:
    """Build the tree from a wheel or from the installed package."""
    series = Series.load()
    if given.from_package:
        package = Installed(given.from_package)
        release = series.release(package.version)
        return _build(given, series, release, package)
    release = series.release(given.release) if given.release else series.newest
    with progress("fetch", [release]), Wheel(release) as wheel:
        return _build(given, series, release, wheel)


def _build(
    given: argparse.Namespace, series: Series, release: Release, package: tree.Package
) -> int:
    selection = series.select(given.patch, given.without)
    layer = Layer(package, release.name, series.overlay)
    lay(layer, selection.patches)
    for remark in selection.remarks():
        print(remark)
    built = tree.build(tree.Plan(package, layer, release.timestamp), given.dir, given.replace)
    print_outcomes(layer)
    if not built:
        print(f"{given.dir} is so already")
    print(f"PYTHONPATH={given.dir.absolute() / 'python'}")
    return 0
