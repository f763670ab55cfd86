# SPDX-License-Identifier: Apache-2.0
"""How long `seam` takes on this machine, its wheels cached: check, tree and am.

    bench/seam_speed.py [--json FILE]

Processor time and time on the clock are both told: they differ where others use the machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from frame import machine

from seam import wheels
from seam.series import Series

RELEASE = "0.5.23"
TURNS = 3
GIT = ("git", "-c", "user.name=bench", "-c", "user.email=bench@localhost")


def seconds(command: Sequence[str]) -> tuple[float, float]:
    """Clock and processor seconds of a command that has to end well."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
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
        for what, command in {
            "check, all releases": ["check"],
            "tree": ["tree", "{}", "--release", RELEASE],
            "am, whole series": ["am", source, "--branch", "{}", "--release", RELEASE],
        }.items():
            times = []
            for turn in range(TURNS):
                fresh = str(scratch / f"tree{turn}") if what == "tree" else f"turn{turn}"
                times.append(seconds([*seam, *(word.replace("{}", fresh) for word in command)]))
            clock, processor = (statistics.median(each) for each in zip(*times, strict=True))
            rows.append({"command": what, "clock_s": clock, "processor_s": processor})
            print(f"{what:<20} {clock:6.2f} s  processor {processor:6.2f} s")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({**machine(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
