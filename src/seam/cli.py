# SPDX-License-Identifier: Apache-2.0
"""The command `seam`: its command line; what a verb does is in the module of its name."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from seam.errors import SeamError

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
        # No verb waits for the modules of another.
        return int(importlib.import_module(f"seam.verbs.{given.verb}").run(given))
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
    parser = argparse.ArgumentParser(
        prog="seam", description="Lay the series over any supported SGLang release.", epilog=EPILOG
    )
    verbs = _Verbs(parser)
    _add_for_users(verbs)
    _add_for_maintainers(verbs)
    given, rest = parser.parse_known_args(argv)
    names = getattr(given, given.names, None)
    if rest and (not isinstance(names, list) or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if isinstance(names, list):
        names += rest
    return given


class _Verbs:
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parsers = parser.add_subparsers(metavar="VERB", required=True)

    def add(self, name: str, does: str, names: str = "patch") -> argparse.ArgumentParser:
        """A verb; `names` is where the names go that follow its options."""
        parser = self._parsers.add_parser(name, help=does, description=does, epilog=EPILOG)
        parser.set_defaults(verb=name, names=names)
        return parser


def _add_for_users(verbs: _Verbs) -> None:
    verbs.add("series", "list the patches in order of application")
    does = "resolve the series on releases, all if none is named, and lint"
    check = verbs.add("check", does, names="release")
    check.add_argument("release", nargs="*", metavar="RELEASE")
    check.add_argument("--json", action="store_true", help="print the result for machines")
    check.add_argument(
        "--annotations",
        choices=("github", "none"),
        help="lines for a CI service, on standard error; told by its environment by default",
    )
    build = verbs.add("tree", "build a patched copy of the package, as a small git repository")
    build.add_argument("dir", metavar="DIR", type=Path)
    build.add_argument("patch", nargs="*", metavar="PATCH", help="only these, and what they need")
    source = build.add_mutually_exclusive_group()
    source.add_argument("--release", metavar="R", help="a supported release; the newest by default")
    source.add_argument(
        "--from", dest="from_package", metavar="PACKAGE", help="the installed package: sglang"
    )
    build.add_argument("--without", action="append", default=[], metavar="PATCH")
    build.add_argument("--replace", action="store_true", help="build anew over an unedited tree")
    am = verbs.add("am", "write one commit per patch on a new branch of an SGLang checkout")
    am.add_argument("checkout", metavar="CHECKOUT", type=Path)
    am.add_argument("patch", nargs="*", metavar="PATCH", help="only these, and what they need")
    am.add_argument("--onto", default="HEAD", metavar="REF", help="the commit to start from; HEAD")
    am.add_argument("--branch", metavar="NAME", help="the new branch; pd-series/COMMIT by default")
    am.add_argument("--release", metavar="R", help="the release REF is based on, if it cannot tell")
    am.add_argument(
        "--replace", action="store_true", help="take out what REF carries, and lay this instead"
    )
    show = verbs.add("diff", "print a patch, or all of them, as they are on a release")
    show.add_argument("patch", nargs="?", metavar="PATCH")
    show.add_argument("--release", metavar="R", help="a supported release; the newest by default")
    does = "say which patches an SGLang carries, and whether it is unchanged"
    state = verbs.add("status", does)
    state.add_argument(
        "dir", nargs="?", metavar="DIR", type=Path, help="what this interpreter imports by default"
    )
    state.add_argument("--json", action="store_true", help="print the result for machines")


def _add_for_maintainers(verbs: _Verbs) -> None:
    does = "take the edits of a built tree back into the series, and check it on all releases"
    back = verbs.add("refresh", does)
    back.add_argument("dir", metavar="DIR", type=Path, help="a tree that seam built")
    begin = verbs.add("new", "begin a patch, empty or from the edits of a tree")
    begin.add_argument("name", metavar="NAME")
    begin.add_argument("--from", dest="dir", metavar="DIR", type=Path, help="an edited built tree")
    origin = verbs.add("annotate", "say which patch and hunk put a line of a tree there")
    origin.add_argument("file", metavar="FILE[:LINE]", help="in a built tree or a checkout")
    does = "add a release to the supported ones, and say what is left to do for it"
    release = verbs.add("release", does)
    release.add_argument("version", metavar="VERSION")
    changed = verbs.add("drift", "print what changed in the scopes that patches touch")
    changed.add_argument("old", metavar="OLD", help="a supported release")
    changed.add_argument("new", metavar="NEW", help="another one")
    changed.add_argument("patch", nargs="*", metavar="PATCH", help="only these")
