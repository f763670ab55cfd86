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
from seam.faults import Fault
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
            columns[release.name] = _resolve_and_tidy(series, release)
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
    return release, _resolve_and_tidy(_worker_series[0], release)


def _resolve_and_tidy(series: Series, release: Release) -> Column:
    """Resolve, and leave no syntax tree behind: collection is off while releases are resolved."""
    column = resolve(series, release)
    gc.collect()
    return column


@dataclass(frozen=True)
class Trouble:
    """A misfit, told once for all the releases that have it."""

    patch: str
    misfit: Misfit
    releases: tuple[str, ...]
    last_fit: str | None
    """The newest release below them on which the patch fitted."""

    @property
    def shown(self) -> str:
        """The releases, in few words."""
        if len(self.releases) == 1:
            return self.releases[0]
        return f"{self.releases[0]} … {self.releases[-1]} ({len(self.releases)} releases)"

    def __str__(self) -> str:
        last = [f"last fit  {self.last_fit}"] if self.last_fit else []
        return self.misfit.report(self.patch, self.shown, *last)


def troubles(series: Series, columns: dict[str, Column]) -> list[Trouble]:
    """Everything that does not fit: where, what, on which releases."""
    found: dict[tuple[str, str], tuple[Misfit, list[str]]] = {}
    for name, column in columns.items():
        for patch, cell in column.items():
            for misfit in cell.misfits:
                key = (patch, misfit.report(patch, ""))
                found.setdefault(key, (misfit, []))[1].append(name)
    return [
        Trouble(patch, misfit, tuple(names), _last_fit(series, columns, patch, names[0]))
        for (patch, _), (misfit, names) in found.items()
    ]


def failures(series: Series, columns: dict[str, Column]) -> list[str]:
    """A block of text for each trouble."""
    return [str(trouble) for trouble in troubles(series, columns)]


def _last_fit(series: Series, columns: dict[str, Column], patch: str, release: str) -> str | None:
    order = list(series.releases)
    fitting = (Outcome.APPLIED, Outcome.PRESENT, Outcome.UPSTREAM)
    below = order[: order.index(release)][::-1]
    return next((n for n in below if n in columns and columns[n][patch].outcome in fitting), None)


def as_json(columns: dict[str, Column], lint: Sequence[Fault]) -> dict[str, object]:
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
    faults = [{"file": one.path, "line": one.line, "text": one.text} for one in lint]
    return {"ok": not lint and is_clean(columns), "releases": releases, "lint": faults}


def is_clean(columns: dict[str, Column]) -> bool:
    """Whether no patch has an error anywhere."""
    return not any(cell.misfits for column in columns.values() for cell in column.values())
