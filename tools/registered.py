# SPDX-License-Identifier: Apache-2.0
"""Run the registered unit tests on a release's built tree, or show that they fail without a patch.

registered.py run RELEASE [PATCH…]      what the series brings to RELEASE, with RELEASE's pins
registered.py revert RELEASE [PATCH…]   take each patch's hooks out in turn
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from pdlab import standin
from seam.series import Patch, Series

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
# Outcomes under which a patch's property holds in a release, so that its tests have to pass there.
HOLDS = {"applied", "present", "upstream"}


def seam(*args: str) -> str:
    """Run the applier of this checkout; its messages go to the terminal."""
    command = [sys.executable, "-m", "seam", *args]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def pins(series: Series, release: str) -> Path | None:
    """The directory with the release's own pins, filled once; None for the release of `.venv`."""
    wanted = series.releases[release].pins
    if not wanted:
        return None
    directory, mark = BUILD / "pins" / release, BUILD / "pins" / release / ".pins"
    if not (mark.exists() and mark.read_text().split("\n") == list(wanted)):
        print(f"{release}: installing its pins: {' '.join(wanted)}", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        subprocess.run([*install, str(directory), *wanted], check=True)
        mark.write_text("\n".join(wanted))
    return directory


def run_tests(series: Series, release: str, tree: Path, tests: list[str]) -> tuple[int, Path]:
    """Run test files of a built tree in one process; its exit code and the JUnit report."""
    path = [tree / "python", pins(series, release), standin.python_path()]
    report = BUILD / "reports" / f"{tree.name}.xml"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(entry) for entry in path if entry),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--rootdir={tree}", f"--junitxml={report}", *tests]
    return subprocess.run(command, cwd=tree, env=environment).returncode, report


def tests_of(patch: Patch) -> list[str]:
    """The test files a patch brings."""
    return [path for path in patch.adds if Path(path).name.startswith("test_")]


def run(series: Series, release: str, names: list[str]) -> int:
    """The tests of every patch whose property holds in the release."""
    outcomes = json.loads(seam("check", release, "--json"))["releases"][release]
    chosen = [
        patch
        for patch in series.patches
        if outcomes[patch.name]["outcome"] in HOLDS and (not names or patch.name in names)
    ]
    tree = BUILD / release
    seam("tree", str(tree), "--release", release, "--replace")
    tests = [test for patch in chosen for test in tests_of(patch)]
    for test in tests:  # a patch that is upstream brings no commit, yet its tests have to pass
        target = tree / test
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / test, target)
    print(f"{release}: {len(tests)} test files of {len(chosen)} patches", flush=True)
    return run_tests(series, release, tree, tests)[0]


def revert(series: Series, release: str, names: list[str]) -> int:
    """Without a patch's hooks, each of its test files must have a test that fails."""
    outcomes = json.loads(seam("check", release, "--json"))["releases"][release]
    silent = []
    for patch in series.patches:
        if names and patch.name not in names:
            continue
        if outcomes[patch.name]["outcome"] != "applied":
            print(
                f"{patch.name}: {outcomes[patch.name]['outcome']} in {release}, nothing to revert"
            )
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
