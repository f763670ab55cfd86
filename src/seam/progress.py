# SPDX-License-Identifier: Apache-2.0
"""How far a verb that takes seconds has come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from seam.series import Release
from seam.wheels import is_cached


@contextmanager
def progress(what: str, releases: Sequence[Release]) -> Iterator[Callable[[Release], None]]:
    """A bar on a terminal; elsewhere one line for each wheel that has to be fetched."""
    console = Console(stderr=True)
    missing = [release for release in releases if not is_cached(release)]
    if not console.is_terminal:
        for release in missing:
            print(f"fetching {release.wheel}", file=sys.stderr)
        yield lambda release: None
        return
    text = f"{what} ({len(missing)} to fetch)" if missing else what
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(text, total=len(releases))
        yield lambda release: bar.update(task, advance=1)
