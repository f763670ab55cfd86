# SPDX-License-Identifier: Apache-2.0
"""Which patch and hunk put a line there."""

from __future__ import annotations

import argparse
import re
from itertools import groupby
from pathlib import Path

from seam.annotate import Origin, annotate
from seam.series import Series


def run(given: argparse.Namespace) -> int:
    """Print the origin of a line, or of each run of lines of ours."""
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
