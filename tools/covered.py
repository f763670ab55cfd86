# SPDX-License-Identifier: Apache-2.0
"""How much of `src/` and `python/` the tests run, line by line: `make coverage`.

covered.py [seam] [lab] [python] [servers]   these parts; by default all that start no servers

A part is measured by the tests it belongs to; a later run keeps what an earlier one found of other
parts, so that `covered.py python` after `covered.py seam` reports both. Ends with 1 when a part
that was measured has fewer lines run than is promised.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from collections.abc import Callable

import coverage
import registered

from seam.layer import Outcome
from seam.series import Series

ROOT = registered.ROOT
DATA = ROOT / "build" / "coverage"
PROMISED = 90.0
"""Percent of the lines of each place."""
RELEASES = ("0.5.23", "0.5.11")
"""The newest, and one that needs what the newest has of upstream's own."""
PLACES = {"src/seam": ("seam",), "src/pdlab": ("lab", "servers"), "python": ("python",)}
"""What is reported, and the parts that run it."""


def measured(part: str) -> list[str]:
    """The words, after the interpreter, under which tests of a part run."""
    words = ["-m", "coverage", "run", f"--rcfile={ROOT / 'pyproject.toml'}"]
    return [*words, f"--data-file={DATA / part}"]


def here(part: str, *tests: str) -> int:
    """Run tests of this repository."""
    # Absolute: processes that a test starts work elsewhere.
    words = [*measured(part), f"--source={ROOT / 'src'}", "-m", "pytest", "-p", "no:cacheprovider"]
    return subprocess.run([sys.executable, *words, *tests], cwd=ROOT).returncode


def on_trees(part: str) -> int:
    """Run the registered tests on built trees; only files of ours are looked at."""
    series, status = Series.load(), 0
    for release in RELEASES:
        found = registered.outcomes(series, release)
        patches = [patch for patch in series.patches if found[patch.name] is Outcome.APPLIED]
        tree = registered.BUILD / release
        registered.seam("tree", str(tree), "--release", release, "--replace")
        modules = [path for patch in patches for path in patch.adds if path.startswith("python/")]
        include = ",".join(str(tree / path) for path in modules)
        words = [*measured(part), f"--include={include}"]
        tests = [str(tree / test) for patch in patches for test in registered.tests_of(patch)]
        status |= registered.run_tests(series, release, tree, tests, words)[0]
    return status


USUAL = ("seam", "lab", "python")
PARTS: dict[str, Callable[[], int]] = {
    "seam": lambda: here("seam", "test/seam"),
    "lab": lambda: here("lab", "test/lab", "-m", "not servers"),
    "python": lambda: on_trees("python"),
    "servers": lambda: here("servers", "test/lab", "-m", "servers"),
}


def report(parts: set[str]) -> bool:
    """Print what was run of each file; whether the places of `parts` have what is promised."""
    (DATA / "all").unlink(missing_ok=True)
    files = [str(file) for file in DATA.glob("*.*")]
    whole = coverage.Coverage(data_file=str(DATA / "all"), config_file=str(ROOT / "pyproject.toml"))
    whole.combine(files, strict=True, keep=True)
    held = True
    for place, by in PLACES.items():
        if not any(list(DATA.glob(f"{part}.*")) for part in by):
            continue
        told = io.StringIO()
        percent = whole.report(include=f"{place}/*", file=told, show_missing=True, precision=1)
        short = percent < PROMISED and bool(parts & set(by))
        held &= not short
        print(told.getvalue())
        print(f"{place}: {percent:.1f} % of the lines{f', below {PROMISED:g}' * short}\n")
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="*", help=f"of {', '.join(PARTS)}; default {' '.join(USUAL)}")
    given = parser.parse_args()
    if unknown := set(given.part) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    os.chdir(ROOT)
    DATA.mkdir(parents=True, exist_ok=True)
    failed = []
    parts = given.part or USUAL
    for part in parts:
        for file in DATA.glob(f"{part}.*"):
            file.unlink()
        if PARTS[part]():
            failed.append(part)
    held = report(set(parts))
    if failed:
        print(f"tests failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed) or not held)


if __name__ == "__main__":
    sys.exit(main())
