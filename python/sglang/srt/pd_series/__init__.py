# SPDX-License-Identifier: Apache-2.0
"""Which patches of the series this tree carries, and whether it still is what their stamps say.

Every patch brings one generated module into `stamps/`. A stamp names its patch and release, the
digests of the modules the patch added, and the lines its edits produced. Nothing else is trusted:
a tree that lost a hook in a merge, or had half of it overwritten by a package upgrade, would serve
with a part of the series and nobody would know. Such a tree refuses to start.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import pkgutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

# Lets a tree that was edited by hand start, with a warning: for whoever develops the series.
ALLOW_EDITED = "SGLANG_PD_SERIES_ALLOW_EDITED"

_STAMPS = "stamps"
_SGLANG = Path(__file__).resolve().parents[2]  # of a checkout, a built tree or an installed package


class TreeChanged(RuntimeError):
    """The tree is not what its stamps say."""


@dataclass(frozen=True)
class Stamp:
    """What one patch says of itself; paths are relative to the checkout (`python/sglang/…`)."""

    patch: str
    release: str
    adds: dict[str, str]  # added module -> sha256 of its bytes
    lines: dict[str, dict[str, int]]  # edited file -> stripped line -> how often it stands there

    def faults(self, sglang: Path) -> list[str]:
        """What this patch brought and the package no longer has, one sentence each."""
        found = []
        for path, digest in self.adds.items():
            data = _read(sglang, path)
            if data is None:
                found.append(f"{self.patch}: {path} is missing")
            elif hashlib.sha256(data).hexdigest() != digest:
                found.append(f"{self.patch}: {path} was changed")
        for path, lines in self.lines.items():
            data = _read(sglang, path)
            if data is None:
                found.append(f"{self.patch}: {path} is missing")
                continue
            have = Counter(line.strip() for line in data.decode("utf-8", "replace").splitlines())
            found += [
                f"{self.patch}: {path} lost the line {line!r}"
                for line, times in lines.items()
                if have[line] < times
            ]
        return found


def carried() -> list[Stamp]:
    """The stamps of this tree, by patch name."""
    package = f"{__name__}.{_STAMPS}"
    found = []
    for entry in pkgutil.iter_modules([str(Path(__file__).parent / _STAMPS)]):
        module = importlib.import_module(f"{package}.{entry.name}")
        found.append(Stamp(module.PATCH, module.RELEASE, module.ADDS, module.LINES))
    return sorted(found, key=lambda stamp: stamp.patch)


def describe(found: list[Stamp]) -> str:
    """One line for the log: `release 0.5.23, 2 patches: cpu-pd, suffix-slice (made for 0.5.11)`.

    The release is the one that most stamps name: a patch that was cherry-picked from a branch of
    another release says so in brackets.
    """
    if not found:
        return "no patches"
    release, _ = Counter(stamp.release for stamp in found).most_common(1)[0]
    names = [
        stamp.patch if stamp.release == release else f"{stamp.patch} (made for {stamp.release})"
        for stamp in found
    ]
    return f"release {release}, {len(names)} patches: {', '.join(names)}"


def announce() -> None:
    """Log one line with release and patches; raise `TreeChanged` when the tree is another one."""
    found = carried()
    faults = [fault for stamp in found for fault in stamp.faults(_SGLANG)]
    if not faults:
        logger.info("pd-series: %s", describe(found))
        return
    report = "\n  ".join(["the tree is not what its stamps say:", *faults])
    if os.environ.get(ALLOW_EDITED) == "1":
        logger.warning("pd-series: %s (edited)\n%s", describe(found), report)
        return
    raise TreeChanged(
        f"pd-series: {report}\n"
        "Lay the series anew (seam tree, or seam am), or set "
        f"{ALLOW_EDITED}=1 to start an edited tree."
    )


def _read(sglang: Path, path: str) -> bytes | None:
    """The bytes of a checkout's `path` in the package directory `sglang`; None when it is gone."""
    file = sglang / Path(path).relative_to("python/sglang")
    return file.read_bytes() if file.is_file() else None
