# SPDX-License-Identifier: Apache-2.0
"""How long `seam` takes on this machine, its wheels cached: check, tree and am.

    bench/seam_speed.py [--json FILE]

Processor time and time on the clock are both told: they differ where others use the machine.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import frame

from seam import wheels
from seam.series import Series

RELEASE = "0.5.23"
TURNS = 3
FEW = 10
"""As many patches as the aims for these times are set for."""
GIT = ("git", "-c", "user.name=bench", "-c", "user.email=bench@localhost")


def seconds(command: Sequence[str], folder: Path) -> tuple[float, float]:
    """Clock and processor seconds of a command in a folder; it has to end well."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    clock = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def checkout(directory: Path) -> Path:
    """A git checkout with the sources of the release."""
    with zipfile.ZipFile(wheels.fetch(Series.load().releases[RELEASE])) as wheel:
        names = [name for name in wheel.namelist() if name.startswith("sglang/srt/")]
        wheel.extractall(directory / "python", names)
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", RELEASE)):
        subprocess.run([*GIT, "-C", str(directory), *words], check=True)
    return directory


def of_few(directory: Path) -> Path:
    """A repository with the first patches of the series only, and the files that they add."""
    series = Series.load()
    few = series.patches[:FEW]
    (directory / "src" / "seam").mkdir(parents=True)
    kept = ["series/releases.toml", *(f"series/{patch.name}.seam" for patch in few)]
    for path in [*kept, *(path for patch in few for path in patch.adds)]:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(series.root / path, directory / path)
    (directory / "series" / "series").write_text("".join(f"{patch.name}\n" for patch in few))
    return directory


def main() -> int:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    given = parser.parse_args()
    seam = [sys.executable, "-m", "seam"]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        source = str(checkout(scratch / "checkout"))
        repositories = {"": Series.load().root, f", {FEW} patches": of_few(scratch / "few")}
        for (about, root), (verb, words) in itertools.product(
            repositories.items(),
            {
                "check": (),
                "tree": ("{}", "--release", RELEASE),
                "am": (source, "--branch", "{}", "--release", RELEASE),
            }.items(),
        ):
            what, times = f"{verb}{about}", []
            for turn in range(TURNS):
                fresh = str(scratch / f"{what}-{turn}") if verb == "tree" else f"{root.name}{turn}"
                command = [*seam, verb, *(word.replace("{}", fresh) for word in words)]
                times.append(seconds(command, root))
            row: dict[str, object] = {"command": what}
            told = f"{what:<20}"
            for name, values in zip(("clock", "processor"), zip(*times, strict=True), strict=True):
                low, _, high = statistics.quantiles(values)
                row |= {f"{name}_s": statistics.median(values), f"{name}_quartiles_s": [low, high]}
                told += f"  {name} {row[f'{name}_s']:6.2f} ±{(high - low) / 2:.2f} s"
            rows.append(row)
            print(told, flush=True)
    frame.write(given.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
