# SPDX-License-Identifier: Apache-2.0
"""A patch, or all of them, as they are on a release."""

from __future__ import annotations

import argparse
import sys

from seam import diff
from seam.layer import Layer
from seam.progress import progress
from seam.series import Series
from seam.verbs.laid import lay
from seam.wheels import Wheel


def run(given: argparse.Namespace) -> int:
    """Print patches as they are on a release."""
    series = Series.load()
    release = series.release(given.release) if given.release else series.newest
    chosen = [series.patch(given.patch)] if given.patch else list(series.patches)
    last = series.patches.index(chosen[-1]) + 1
    with progress("fetch", [release]), Wheel(release) as wheel:
        layer = Layer(wheel, release.name, series.overlay)
        lay(layer, series.patches[:last])
    for patch in chosen:
        result = layer.results[patch.name]
        print(f"{patch.name} on {release.name}: {result.outcome.value}", file=sys.stderr)
        sys.stdout.write(diff.render(result))
    return 0
