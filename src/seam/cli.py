# SPDX-License-Identifier: Apache-2.0
"""The command `seam`: its verbs, and what they print."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from seam import matrix, tree
from seam.errors import SeamError
from seam.layer import Layer, Outcome
from seam.series import Release, Series
from seam.wheels import Wheel, is_cached

EPILOG = (
    "exit status: 0 all that was asked is true or done, 1 it is not, 2 the command line is wrong"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit status."""
    given = _parser().parse_args(argv)
    try:
        return int(given.verb(given))
    except SeamError as error:
        print(f"seam: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("seam: interrupted; nothing was left half written", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="seam", description="Lay the series over any supported SGLang release.", epilog=EPILOG
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(run: Callable[[argparse.Namespace], int], name: str, does: str
             ) -> argparse.ArgumentParser:  # fmt: skip
        sub = verbs.add_parser(name, help=does, description=does, epilog=EPILOG)
        sub.set_defaults(verb=run)
        return sub

    verb(_series, "series", "list the patches in order of application")
    check = verb(_check, "check", "resolve the series on releases, all if none is named, and lint")
    check.add_argument("release", nargs="*", metavar="RELEASE")
    check.add_argument("--json", action="store_true", help="print the result for machines")
    build = verb(_tree, "tree", "build a patched copy of the package, as a small git repository")
    build.add_argument("dir", metavar="DIR", type=Path)
    build.add_argument("patch", nargs="*", metavar="PATCH", help="only these, and what they need")
    build.add_argument("--release", metavar="R", help="a supported release; the newest by default")
    build.add_argument("--without", action="append", default=[], metavar="PATCH")
    build.add_argument("--replace", action="store_true", help="build anew over an unedited tree")
    return parser


def _series(_: argparse.Namespace) -> int:
    for patch in Series.load().patches:
        print(f"{patch.name}: {patch.subject}")
        for key, values in (("adds", patch.adds), ("in", _paths(patch.files))):
            for value in values:
                print(f"    {key:<4} {value}")
        for directive in patch.trailer("Directive"):
            print(f"    then {directive}")
    return 0


def _paths(files: Sequence[object]) -> list[str]:
    return [" | ".join(getattr(file, "paths", ())) for file in files]


def _check(given: argparse.Namespace) -> int:
    series = Series.load()
    releases = [series.release(name) for name in given.release] or list(series.releases.values())
    with _progress("check", releases) as done:
        columns = matrix.resolve_all(series, releases, done)
    lint: list[str] = []
    if given.json:
        print(json.dumps(matrix.as_json(columns, lint), indent=2))
    else:
        _print_matrix(series, columns)
        for text in (*matrix.failures(series, columns), *lint):
            print(f"\n{text}")
    return 0 if not lint and matrix.is_clean(columns) else 1


@contextmanager
def _progress(what: str, releases: Sequence[Release]) -> Iterator[Callable[[Release], None]]:
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
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task(text, total=len(releases))
        yield lambda release: progress.update(task, advance=1)


def _print_matrix(series: Series, columns: dict[str, matrix.Column]) -> None:
    console = Console(highlight=False)
    colours = {Outcome.APPLIED: "green", Outcome.UPSTREAM: "cyan", Outcome.ERROR: "bold red"}
    table = Table(box=None, padding=(0, 1), header_style="")
    table.add_column(
        "", no_wrap=True, min_width=max((len(p.name) for p in series.patches), default=0)
    )
    for name in columns:
        table.add_column(series.releases[name].label, justify="right", no_wrap=True)
    for patch in series.patches:
        cells = [column[patch.name].outcome for column in columns.values()]
        marks = [
            f"[{colours[cell]}]{matrix.MARKS[cell]}[/]" if cell in colours else matrix.MARKS[cell]
            for cell in cells
        ]
        table.add_row(patch.name, *marks)
    width = max(console.width, 160) if not console.is_terminal else console.width
    console.print(table, width=width)
    legend = "  ".join(f"{mark} {outcome.value}" for outcome, mark in matrix.MARKS.items())
    console.print(legend, style="dim")


def _tree(given: argparse.Namespace) -> int:
    gc.disable()
    series = Series.load()
    release = series.release(given.release) if given.release else series.newest
    with _progress("fetch", [release]), Wheel(release) as wheel:
        layer = _lay(series, wheel, release, given.patch, given.without)
        built = tree.build(tree.Plan(wheel, layer, release.timestamp), given.dir, given.replace)
    _print_outcomes(layer)
    if not built:
        print(f"{given.dir} is as it should be already")
    print(f"PYTHONPATH={given.dir.absolute() / 'python'}")
    return 0


def _lay(
    series: Series, pristine: Wheel, release: Release, names: list[str], without: list[str]
) -> Layer:
    """Resolve the chosen patches in memory; `SeamError` with every misfit when one has any."""
    patches, pulled = series.select(names, without)
    if pulled:
        print(f"also laid, because others need them: {', '.join(pulled)}")
    layer = Layer(pristine, release.name, series.overlay)
    layer.lay(patches)
    if layer.misfits:
        raise SeamError(
            f"the series does not fit {release.name}; nothing was written\n"
            + "\n".join(
                f"{patch.name}.seam:{misfit.line}: {misfit.kind.value}\n  "
                + "\n  ".join(misfit.lines)
                for patch, misfit in layer.misfits
            )
        )
    return layer


def _print_outcomes(layer: Layer) -> None:
    for name, result in layer.results.items():
        print(f"{result.outcome.value:<21} {name}")
        for note in result.notes:
            print(f"{'':<21} {note}")
