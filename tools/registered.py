# SPDX-License-Identifier: Apache-2.0
"""Run the registered unit tests on a release's built tree, or show that they fail without a patch.

registered.py run RELEASE [PATCH…]      what the series brings to RELEASE, with RELEASE's pins
registered.py revert RELEASE [PATCH…]   take each patch's hooks out in turn
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from pdlab import standin
from seam import matrix
from seam.layer import Outcome
from seam.series import Patch, Release, Series

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
# Outcomes under which a patch's property holds in a release, so that its tests have to pass there.
HOLDS = {Outcome.APPLIED, Outcome.PRESENT, Outcome.UPSTREAM}


def seam(*args: str) -> None:
    """Run the applier of this checkout; its messages go to the terminal."""
    command = [sys.executable, "-m", "seam", *args]
    if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
        sys.exit(1)


def outcomes(series: Series, release: str) -> dict[str, Outcome]:
    """What becomes of each patch on a release; ends the run when one does not fit."""
    column = matrix.resolve(series, series.releases[release])
    if trouble := list(matrix.failures(series, {release: column})):
        sys.exit("\n".join(trouble))
    return {name: cell.outcome for name, cell in column.items()}


def pins(release: Release) -> Path:
    """The directory with what a run of the release needs at other versions than `.venv` has."""
    wanted = [pin for pin in release.pins if not _installed(pin)]
    directory = BUILD / "pins" / release.name
    mark = directory / ".pins"
    text = "\n".join([*wanted, *release.stand_ins])
    if not (mark.exists() and mark.read_text() == text):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        if wanted:
            print(f"{release.name}: installing its pins: {' '.join(wanted)}", flush=True)
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
            subprocess.run([*command, str(directory), *wanted], check=True)
        for package in release.stand_ins:
            (directory / f"{package}.py").write_text("")
        mark.write_text(text)
    return directory


def _installed(pin: str) -> bool:
    """Whether `.venv` has exactly this version."""
    name, _, version = pin.partition("==")
    try:
        return metadata.version(name) == version
    except metadata.PackageNotFoundError:
        return False


def run_tests(
    series: Series, release: str, tree: Path, tests: list[str], under: Sequence[str] = ()
) -> tuple[int, Path]:
    """Run test files of a built tree in one process; its exit code and the JUnit report.

    `under`: words before `-m pytest`, of a module that runs it.
    """
    path = [tree / "python", pins(series.releases[release]), standin.python_path()]
    report = BUILD / "reports" / f"{tree.name}.xml"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(entry) for entry in path if entry),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, *under, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", f"--rootdir={tree}", f"--junitxml={report}", *tests]
    return subprocess.run(command, cwd=tree, env=environment).returncode, report


def tests_of(patch: Patch) -> list[str]:
    """The test files a patch brings."""
    return [path for path in patch.adds if Path(path).name.startswith("test_")]


def located(tree: Path, test: str) -> str:
    """A test in the tree, or here when upstream has the cure and the patch brought no commit."""
    return str(next(root / test for root in (tree, ROOT) if (root / test).exists()))


def run(series: Series, release: str, names: list[str]) -> int:
    """The tests of every patch whose property holds in the release."""
    found = outcomes(series, release)
    chosen = [
        patch
        for patch in series.patches
        if found[patch.name] in HOLDS and (not names or patch.name in names)
    ]
    tree = BUILD / release
    seam("tree", str(tree), "--release", release, "--replace")
    tests = [located(tree, test) for patch in chosen for test in tests_of(patch)]
    print(f"{release}: {len(tests)} test files of {len(chosen)} patches", flush=True)
    return run_tests(series, release, tree, tests)[0]


def revert(series: Series, release: str, names: list[str]) -> int:
    """Without a patch's hooks, each of its test files must have a test that fails."""
    found = outcomes(series, release)
    silent = []
    for patch in series.patches:
        if names and patch.name not in names:
            continue
        if found[patch.name] is not Outcome.APPLIED:
            print(f"{patch.name}: {found[patch.name].value} in {release}, nothing to revert")
            continue
        tree = BUILD / f"{release}-without-{patch.name}"
        shutil.rmtree(tree, ignore_errors=True)
        seam("tree", str(tree), "--release", release, "--without", patch.name)
        for path in patch.adds:  # the module alone must not pass its tests: the hooks matter
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, tree / path)
        for test in tests_of(patch):
            _, report = run_tests(series, release, tree, [test])
            failed = failures(report)
            print(f"{patch.name}: {test}: {len(failed)} fail: {', '.join(failed[:4])}", flush=True)
            if not failed:
                silent.append(f"{patch.name}: {test}")
        shutil.rmtree(tree)
    for line in silent:
        print(f"PASSES WITHOUT ITS PATCH  {line}", file=sys.stderr)
    return 1 if silent else 0


def failures(report: Path) -> list[str]:
    """The names of the tests that ran and failed."""
    cases = ElementTree.parse(report).iter("testcase")
    return [case.get("name", "?") for case in cases if case.find("failure") is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("run", "revert"))
    parser.add_argument("release")
    parser.add_argument("patch", nargs="*")
    given = parser.parse_args()
    series = Series.load()
    if given.release not in series.releases:
        parser.error(f"unknown release {given.release}; known: {', '.join(series.releases)}")
    action = run if given.action == "run" else revert
    return action(series, given.release, given.patch)


if __name__ == "__main__":
    sys.exit(main())
