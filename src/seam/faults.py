# SPDX-License-Identifier: Apache-2.0
"""A fault of the series: where it is, and what is wrong there."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """Something wrong in a file of the series, whatever the release."""

    path: str
    """Relative to the repository."""
    line: int
    """Counted from 1; 0 when the whole file is meant."""
    text: str

    def __str__(self) -> str:
        shown = self.path.removeprefix("series/")  # seam files go by name in every message
        place = f"{shown}:{self.line}" if self.line else shown
        return f"{place}: {self.text}"


def seam_path(patch: str) -> str:
    """The seam file of a patch."""
    return f"series/{patch}.seam"
