# SPDX-License-Identifier: Apache-2.0
"""The series on releases, and the mistakes in it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from seam import ci, matrix
from seam.layer import Outcome
from seam.lint import lint
from seam.progress import progress
from seam.series import Series


def run(given: argparse.Namespace) -> int:
    """Check what the command line names."""
    return check(Series.load(), given.release, given.json, given.annotations)


def check(
    series: Series,
    names: Sequence[str] = (),
    as_json: bool = False,
    annotations: str | None = None,
) -> int:
    """Resolve the series on the named releases, all if there are none, and lint it.

    Prints the matrix and what is wrong; the exit status is 0 when nothing is. `annotations` are
    for a CI service, by default the one that runs us.
    """
    releases = [series.release(name) for name in names] or list(series.releases.values())
    with progress("check", releases) as done:
        columns = matrix.resolve_all(series, releases, done)
    faults = lint(series)
    if as_json:
        print(json.dumps(matrix.as_json(columns, faults), indent=2))
    else:
        _print_matrix(series, columns)
        told = "\n".join(map(str, faults))
        for text in filter(None, (*matrix.failures(series, columns), told)):
            print(f"\n{text}")
    if (annotations or ci.service()) == "github":
        for line in ci.github(matrix.troubles(series, columns), faults):
            print(line, file=sys.stderr)
    return 0 if not faults and matrix.is_clean(columns) else 1


def _print_matrix(series: Series, columns: dict[str, matrix.Column]) -> None:
    console = Console(highlight=False)
    colours = {Outcome.APPLIED: "green", Outcome.UPSTREAM: "cyan", Outcome.ERROR: "bold red"}
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="")
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(series.releases[name].label.replace(".", "\n"), justify="right")
    for patch in series.patches:
        cells = (column[patch.name].outcome for column in columns.values())
        marks = (Text(matrix.MARKS[cell], style=colours.get(cell, "")) for cell in cells)
        table.add_row(patch.name, *marks)
    console.print(table)
    legend = "  ".join(f"{mark} {outcome.value}" for outcome, mark in matrix.MARKS.items())
    console.print(legend, style="dim")
