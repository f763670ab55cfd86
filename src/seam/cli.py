# SPDX-License-Identifier: Apache-2.0
"""The command `seam`: its verbs, and what they print."""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from seam import ci, diff, matrix, tree, upkeep
from seam.checkout import Checkout
from seam.errors import SeamError
from seam.installed import Installed
from seam.layer import Layer, Outcome
from seam.lint import lint
from seam.seamfile import Patch
from seam.series import Release, Selection, Series
from seam.status import status
from seam.takeout import TakenOut
from seam.wheels import Wheel, is_cached

EPILOG = (
    "exit status: 0 all that was asked is true or done, 1 it is not, 2 the command line is wrong"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit status."""
    given = _parse(argv)
    gc.disable()  # syntax trees are large and have no cycles; half the time went there
    # Ending like an interrupt: folders that are not finished are taken away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return int(given.verb(given))
    except SeamError as error:
        print(f"seam: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read the output has seen enough; nothing must be written when we exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("seam: interrupted; nothing was left half written", file=sys.stderr)
        return 130
    finally:
        gc.enable()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Names may follow options too, which argparse alone does not allow under a verb."""
    parser = _parser()
    given, rest = parser.parse_known_args(argv)
    names = getattr(given, given.names, None)
    if rest and (not isinstance(names, list) or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if isinstance(names, list):
        names += rest
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="seam", description="Lay the series over any supported SGLang release.", epilog=EPILOG
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(run: Callable[[argparse.Namespace], int], name: str, does: str
             ) -> argparse.ArgumentParser:  # fmt: skip
        sub = verbs.add_parser(name, help=does, description=does, epilog=EPILOG)
        sub.set_defaults(verb=run, names="patch")
        return sub

    verb(_series, "series", "list the patches in order of application")
    check = verb(_check, "check", "resolve the series on releases, all if none is named, and lint")
    check.add_argument("release", nargs="*", metavar="RELEASE")
    check.set_defaults(names="release")
    check.add_argument("--json", action="store_true", help="print the result for machines")
    check.add_argument(
        "--annotations",
        choices=ci.SERVICES,
        default=ci.service(),
        help="lines for a CI service, on standard error; told by its environment by default",
    )
    build = verb(_tree, "tree", "build a patched copy of the package, as a small git repository")
    build.add_argument("dir", metavar="DIR", type=Path)
    build.add_argument("patch", nargs="*", metavar="PATCH", help="only these, and what they need")
    source = build.add_mutually_exclusive_group()
    source.add_argument("--release", metavar="R", help="a supported release; the newest by default")
    source.add_argument(
        "--from", dest="from_package", metavar="PACKAGE", help="the installed package: sglang"
    )
    build.add_argument("--without", action="append", default=[], metavar="PATCH")
    build.add_argument("--replace", action="store_true", help="build anew over an unedited tree")
    am = verb(_am, "am", "write one commit per patch on a new branch of an SGLang checkout")
    am.add_argument("checkout", metavar="CHECKOUT", type=Path)
    am.add_argument("patch", nargs="*", metavar="PATCH", help="only these, and what they need")
    am.add_argument("--onto", default="HEAD", metavar="REF", help="the commit to start from; HEAD")
    am.add_argument("--branch", metavar="NAME", help="the new branch; pd-series/COMMIT by default")
    am.add_argument("--release", metavar="R", help="the release REF is based on, if it cannot tell")
    am.add_argument(
        "--replace", action="store_true", help="take out what REF carries, and lay this instead"
    )
    show = verb(_diff, "diff", "print a patch, or all of them, as they are on a release")
    show.add_argument("patch", nargs="?", metavar="PATCH")
    show.add_argument("--release", metavar="R", help="a supported release; the newest by default")
    state = verb(
        _status, "status", "say which patches an SGLang carries, and whether it is unchanged"
    )
    state.add_argument(
        "dir", nargs="?", metavar="DIR", type=Path, help="what this interpreter imports by default"
    )
    state.add_argument("--json", action="store_true", help="print the result for machines")
    upkeep.register(verb, _again)
    return parser


def _again(argv: Sequence[str]) -> int:
    given = _parse(argv)
    return int(given.verb(given))


def _series(_: argparse.Namespace) -> int:
    for patch in Series.load().patches:
        print(f"{patch.name}: {patch.subject}")
        rows = [("adds", path) for path in patch.adds]
        rows += [("in", " | ".join(file.paths)) for file in patch.files]
        rows += [("then", directive) for directive in patch.trailer("Directive")]
        for key, value in rows:
            print(f"    {key:<4} {value}")
    return 0


def _check(given: argparse.Namespace) -> int:
    series = Series.load()
    releases = [series.release(name) for name in given.release] or list(series.releases.values())
    with _progress("check", releases) as done:
        columns = matrix.resolve_all(series, releases, done)
    faults = lint(series)
    if given.json:
        print(json.dumps(matrix.as_json(columns, faults), indent=2))
    else:
        _print_matrix(series, columns)
        told = "\n".join(map(str, faults))
        for text in filter(None, (*matrix.failures(series, columns), told)):
            print(f"\n{text}")
    if given.annotations == "github":
        for line in ci.github(matrix.troubles(series, columns), faults):
            print(line, file=sys.stderr)
    return 0 if not faults and matrix.is_clean(columns) else 1


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


def _tree(given: argparse.Namespace) -> int:
    series = Series.load()
    if given.from_package:
        package = Installed(given.from_package)
        release = series.release(package.version)
        return _build_tree(given, series, release, package)
    release = series.release(given.release) if given.release else series.newest
    with _progress("fetch", [release]), Wheel(release) as wheel:
        return _build_tree(given, series, release, wheel)


def _build_tree(
    given: argparse.Namespace, series: Series, release: Release, package: tree.Package
) -> int:
    selection = series.select(given.patch, given.without)
    layer = Layer(package, release.name, series.overlay)
    _lay(layer, selection.patches)
    for remark in selection.remarks():
        print(remark)
    built = tree.build(tree.Plan(package, layer, release.timestamp), given.dir, given.replace)
    _print_outcomes(layer)
    if not built:
        print(f"{given.dir} is so already")
    print(f"PYTHONPATH={given.dir.absolute() / 'python'}")
    return 0


def _lay(layer: Layer, patches: Sequence[Patch]) -> None:
    """Resolve the patches in memory; `SeamError` with every misfit when one has any."""
    layer.lay(patches)
    if layer.misfits:
        told = [misfit.report(patch.name, layer.release) for patch, misfit in layer.misfits]
        raise SeamError("\n".join(["the series does not fit; nothing was written", *told]))


def _print_outcomes(layer: Layer) -> None:
    for name, result in layer.results.items():
        print(f"{result.outcome.value:<21}{name}")
        for note in result.notes:
            print(f"{'':<21}{note}")


def _am(given: argparse.Namespace) -> int:
    series = Series.load()
    asked = series.release(given.release).name if given.release else None
    selection = series.select(given.patch)
    with Checkout(given.checkout, given.onto) as checkout:
        branch = given.branch or f"pd-series/{checkout.label}"
        ground = TakenOut(checkout) if given.replace else None
        carried = [] if ground else checkout.carried()
        there = [stamp.patch for stamp in carried]
        _refuse_carried(selection, there, checkout.label)
        if checkout.repository.has_branch(branch):
            raise SeamError(f"there is a branch {branch} already; choose another: --branch NAME")
        release = asked or checkout.release()
        layer = Layer(ground or checkout, release, series.overlay, carried)
        _lay(layer, [patch for patch in selection.patches if patch.name not in there])
        commits = tree.commits(layer, checkout.timestamp)
        if ground:
            commits = ground.below(commits, layer.read)
        head = checkout.repository.write(branch, commits, checkout.commit) if commits else ""
    for remark in selection.remarks(there):
        print(remark)
    if ground and commits and ground.patches:
        print(f"taken out first: {', '.join(ground.patches)}")
    _print_outcomes(layer)
    if release not in series.releases:
        print(f"{release} is not one of the supported releases, but everything found its place")
    if head:
        print(f"{branch} is {head[:10]}: {len(commits)} commits on {checkout.label} ({release})")
    else:
        print(f"nothing to do on {checkout.label} ({release}); no branch was made")
    return 0


def _refuse_carried(selection: Selection, there: Sequence[str], commit: str) -> None:
    again = [patch.name for patch in selection.patches if patch.name in there]
    again = [name for name in again if name not in selection.pulled]
    if again:
        raise SeamError(
            f"{commit} carries already: {', '.join(again)}; name the patches you want besides, "
            "lay this series in their place: --replace, or name a commit below them: --onto REF"
        )


def _diff(given: argparse.Namespace) -> int:
    series = Series.load()
    release = series.release(given.release) if given.release else series.newest
    chosen = [series.patch(given.patch)] if given.patch else list(series.patches)
    last = series.patches.index(chosen[-1]) + 1
    with _progress("fetch", [release]), Wheel(release) as wheel:
        layer = Layer(wheel, release.name, series.overlay)
        _lay(layer, series.patches[:last])
    for patch in chosen:
        result = layer.results[patch.name]
        print(f"{patch.name} on {release.name}: {result.outcome.value}", file=sys.stderr)
        sys.stdout.write(diff.render(result))
    return 0


def _status(given: argparse.Namespace) -> int:
    found = status(given.dir)
    if given.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print("\n".join(found.lines()))
    return int(not found.is_sound)
