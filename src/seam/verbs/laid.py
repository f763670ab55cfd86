# SPDX-License-Identifier: Apache-2.0
"""A layer that has to fit, and what became of its patches."""

from __future__ import annotations

from collections.abc import Sequence

from seam.errors import SeamError
from seam.layer import Layer
from seam.seamfile import Patch


def lay(layer: Layer, patches: Sequence[Patch]) -> None:
    """Resolve the patches in memory; `SeamError` with every misfit when one has any."""
    layer.lay(patches)
    if layer.misfits:
        told = [misfit.report(patch.name, layer.release) for patch, misfit in layer.misfits]
        raise SeamError("\n".join(["the series does not fit; nothing was written", *told]))


def print_outcomes(layer: Layer) -> None:
    """Print what became of each patch."""
    for name, result in layer.results.items():
        print(f"{result.outcome.value:<21}{name}")
        for note in result.notes:
            print(f"{'':<21}{note}")
