# SPDX-License-Identifier: Apache-2.0
"""The series on many releases: what became of each patch on each."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from seam import apart
from seam.errors import Misfit
from seam.layer import Layer, Outcome
from seam.series import Release, Series
from seam.wheels import Wheel

MARKS = {
    Outcome.APPLIED: "x",
    Outcome.PRESENT: "=",
    Outcome.UPSTREAM: "u",
    Outcome.NOT_FOR_RELEASE: "-",
    Outcome.ERROR: "E",
}


@dataclass(frozen=True)
class Cell:
    """One patch on one release."""

    outcome: Outcome
    notes: tuple[str, ...] = ()
    misfits: tuple[Misfit, ...] = ()


Column = dict[str, Cell]
"""The cells of one release, by patch."""


def resolve(series: Series, release: Release) -> Column:
    """Lay the whole series over a release in memory."""
    with Wheel(release) as wheel:
        layer = Layer(wheel, release.name, series.overlay)
        layer.lay(series.patches)
    found = apart.leaning(layer.results)
    return {
        name: Cell(Outcome.ERROR, result.notes, (*result.misfits, *found[name]))
        if name in found
        else Cell(result.outcome, result.notes, result.misfits)
        for name, result in layer.results.items()
    }


def resolve_all(
    series: Series, releases: Sequence[Release], done: Callable[[Release], None]
) -> dict[str, Column]:
    """Resolve every release, the largest wheels first, on all processors.

    `done` is called as each release is finished. Raises the first `SeamError` of a wheel.
    """
    columns: dict[str, Column] = {}
    workers = min(os.cpu_count() or 1, len(releases))
    if workers < 2:
        for release in releases:
            columns[release.name] = resolve(series, release)
            done(release)
        return columns
    order = sorted(releases, key=lambda release: release.version, reverse=True)
    # A fresh interpreter for each: a fork would copy the thread that draws the progress.
    context = multiprocessing.get_context("spawn")
    with _interrupts_ignored():  # workers inherit that: what an interrupt ends is decided here
        pool = context.Pool(workers, _start_worker, (series.root,))
    with pool:  # ends the workers when it is left, finished or not
        for release, column in pool.imap_unordered(_resolve_in_worker, order):
            columns[release.name] = column
            done(release)
    return {release.name: columns[release.name] for release in releases}


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_worker_series: list[Series] = []


def _start_worker(root: Path) -> None:
    gc.disable()  # syntax trees are large and have no cycles
    _worker_series.append(Series.load(root))


def _resolve_in_worker(release: Release) -> tuple[Release, Column]:
    column = resolve(_worker_series[0], release)
    gc.collect()
    return release, column


def failures(series: Series, columns: dict[str, Column]) -> list[str]:
    """A block of text for each trouble: where, on which releases, what, the last that fitted."""
    releases: dict[tuple[str, str], list[str]] = {}
    for name, column in columns.items():
        for patch, cell in column.items():
            for misfit in cell.misfits:
                releases.setdefault((patch, misfit.report(patch, "{}")), []).append(name)
    told = []
    for (patch, report), names in releases.items():
        shown = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)} releases)"
        last = _last_fit(series, columns, patch, names[0])
        told.append(report.replace("{}", shown, 1) + (f"\n  last fit  {last}" if last else ""))
    return told


def _last_fit(series: Series, columns: dict[str, Column], patch: str, release: str) -> str | None:
    order = list(series.releases)
    fitting = (Outcome.APPLIED, Outcome.PRESENT, Outcome.UPSTREAM)
    below = order[: order.index(release)][::-1]
    return next((n for n in below if n in columns and columns[n][patch].outcome in fitting), None)


def as_json(columns: dict[str, Column], lint: Sequence[str]) -> dict[str, object]:
    """The matrix for machines."""
    releases = {
        name: {
            patch: {
                "outcome": cell.outcome.value,
                "notes": list(cell.notes),
                "errors": [
                    {"kind": one.kind.value, "line": one.line, "text": list(one.lines)}
                    for one in cell.misfits
                ],
            }
            for patch, cell in column.items()
        }
        for name, column in columns.items()
    }
    return {"ok": not lint and is_clean(columns), "releases": releases, "lint": list(lint)}


def is_clean(columns: dict[str, Column]) -> bool:
    """Whether no patch has an error anywhere."""
    return not any(cell.misfits for column in columns.values() for cell in column.values())
