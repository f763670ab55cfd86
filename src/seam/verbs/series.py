# SPDX-License-Identifier: Apache-2.0
"""The patches in order of application."""

from __future__ import annotations

import argparse

from seam.series import Series


def run(_: argparse.Namespace) -> int:
    """Print each patch with what it adds, where it hooks in and its directives."""
    for patch in Series.load().patches:
        print(f"{patch.name}: {patch.subject}")
        rows = [("adds", path) for path in patch.adds]
        rows += [("in", " | ".join(file.paths)) for file in patch.files]
        rows += [("then", directive) for directive in patch.trailer("Directive")]
        for key, value in rows:
            print(f"    {key:<4} {value}")
    return 0
