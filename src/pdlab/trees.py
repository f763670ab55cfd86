# SPDX-License-Identifier: Apache-2.0
"""The SGLang that servers run from: the installed package, or a tree that `seam` built."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pdlab.errors import LabError
from pdlab.settings import Device
from seam import stamp

STOCK, PATCHED = "stock", "patched"
# Nothing else can serve PD on a CPU: what the baseline there has to carry, and nothing more.
CPU_BASELINE = ("series-stamp", "cpu-pd")
CPU_BASELINE_NOTE = "stock + cpu-pd: without that patch no pair serves on a CPU"


@dataclass(frozen=True)
class Tree:
    """A package `sglang` to serve from. `python` None means the installed one."""

    label: str
    release: str
    patches: tuple[str, ...]
    python: Path | None
    note: str = ""
    pins: Path | None = None

    @property
    def path(self) -> tuple[Path, ...]:
        """What goes ahead on PYTHONPATH."""
        return tuple(path for path in (self.python, self.pins) if path)

    def describe(self) -> str:
        """Release, patches and place, for a reader."""
        where = str(self.python.parent) if self.python else "the installed package"
        carried = " ".join(self.patches) or "no patches"
        return f"SGLang {self.release}, {carried} ({where}{'; ' if self.note else ''}{self.note})"


def installed() -> Tree:
    """The package of this interpreter, untouched."""
    if importlib.util.find_spec("sglang") is None:
        raise LabError(
            "SGLang is not installed in this interpreter; on a GPU machine: pip install "
            "'sglang-pd-series[serve]', for the CPU lab: make setup"
        )
    return Tree(STOCK, importlib.metadata.version("sglang"), (), None)


def existing(directory: Path, label: str, note: str = "", build: Path | None = None) -> Tree:
    """A tree on disk; LabError when `directory` is not one."""
    directory = directory.resolve()
    package = directory / "python" / "sglang"
    if not (package / "srt").is_dir():
        raise LabError(
            f"{directory} is not a tree: it has no python/sglang/srt; "
            f"build one with: seam tree {directory}"
        )
    stamps = stamp.read_all(package.parent)
    release = stamps[0].release if stamps else _release_of(package)
    pins = (build or directory.parent) / "pins" / release
    return Tree(
        label,
        release,
        tuple(each.patch for each in stamps),
        package.parent,
        note,
        pins if pins.is_dir() else None,
    )


def patched(release: str, build: Path) -> Tree:
    """The whole series on a release, built by `seam` below `build` unless it is there already."""
    return _built(build / release, release, (), PATCHED, "", build)


def stock(release: str, build: Path, device: Device) -> Tree:
    """What patched servers are compared with: SGLang as it is, or as near as the CPU allows."""
    if device is Device.CPU:
        name = f"{release}-stock"
        return _built(build / name, release, CPU_BASELINE, STOCK, CPU_BASELINE_NOTE, build)
    tree = installed()
    if tree.release != release:
        raise LabError(
            f"stock is the installed SGLang {tree.release}, not {release}; "
            f"use --release {tree.release} or install sglang=={release}"
        )
    return tree


def _built(
    directory: Path, release: str, patches: tuple[str, ...], label: str, note: str, build: Path
) -> Tree:
    """Have `seam` build or check a tree: an older one is replaced, an edited one is an error."""
    words = [sys.executable, "-m", "seam", "tree", str(directory), *patches]
    done = subprocess.run(
        [*words, "--release", release, "--replace"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise LabError(f"no tree for SGLang {release}: {said}")
    return existing(directory, label, note, build)


def _release_of(package: Path) -> str:
    for name in ("_version.py", "version.py"):
        file = package / name
        if file.is_file() and (found := re.search(r"= ['\"](\d[\w.]*)['\"]", file.read_text())):
            return found[1]
    return "unknown"
