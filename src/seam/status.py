# SPDX-License-Identifier: Apache-2.0
"""Which patches an SGLang carries, and whether it still is what was built or installed."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from seam.gitrepo import Repository
from seam.installed import FROM_PACKAGE, Standing, record_changes
from seam.stamp import Stamp
from seam.tree import HEAD
from seam.wheels import PACKAGE

SHOWN = 10
"""Most changed files that are named."""


@dataclass(frozen=True)
class Status:
    """What a support ticket wants to know of an SGLang."""

    python: Path
    version: str
    built_from: str | None
    """What a built tree was made from; None for an installed package or a checkout."""
    installed: str | None
    """The release that is installed for this interpreter."""
    patches: tuple[tuple[Stamp, tuple[str, ...]], ...]
    """Each patch with what of it no longer holds."""
    changed: tuple[str, ...]
    """Files that are not as they were built or installed, those of patches aside."""

    @property
    def is_sound(self) -> bool:
        """Whether everything is as it was built or installed, and fits what is installed."""
        return not (self.changed or self.is_outdated or any(broken for _, broken in self.patches))

    @property
    def is_outdated(self) -> bool:
        """Whether the package that the tree was built from was exchanged since."""
        from_package = self.built_from is not None and FROM_PACKAGE in self.built_from
        return from_package and self.installed not in (None, self.version)

    def lines(self) -> Iterator[str]:
        """The status for people."""
        many = "es" if len(self.patches) > 1 else ""
        count = f"{len(self.patches)} patch{many} of the series"
        carries = count if self.patches else "stock: no patch of the series"
        yield f"{self.python}: sglang {self.version}, {carries}"
        for stamp, broken in self.patches:
            made = "" if stamp.release == self.version else f" (made for {stamp.release})"
            yield f"{'changed' if broken else 'ok':<8} {stamp.patch}: {stamp.subject}{made}"
            yield from (f"{'':<8} {line}" for line in broken)
        yield from (f"edited   {path}" for path in self.changed[:SHOWN])
        if len(self.changed) > SHOWN:
            yield f"{'':<8} and {len(self.changed) - SHOWN} more"
        if self.is_outdated:
            yield (
                f"outdated the tree is {self.version}, but {self.installed} is installed now, with "
                "its own dependencies; build the tree anew"
            )
        if self.built_from:
            yield f"built from {self.built_from}"
        yield f"python {platform.python_version()} at {sys.executable}"

    def as_json(self) -> dict[str, object]:
        """The status for machines."""
        return {
            "ok": self.is_sound,
            "python": str(self.python),
            "sglang": self.version,
            "built_from": self.built_from,
            "installed": self.installed,
            "interpreter": sys.executable,
            "patches": [
                {"name": one.patch, "release": one.release, "broken": list(broken)}
                for one, broken in self.patches
            ],
            "changed": list(self.changed),
        }


def status(folder: Path | None) -> Status:
    """Look at the SGLang under `folder`, else at the one that this interpreter imports."""
    standing = Standing(folder)
    stamps = [(stamp, tuple(stamp.broken(standing.read))) for stamp in standing.stamps]
    of_patches = {path for stamp, _ in stamps for path in (*stamp.adds, *stamp.lines)}
    built_from, changed = _as_built(standing.python.parent)
    if built_from is None:
        changed = [f"python/{path}" for path in record_changes(PACKAGE, standing.python)]
    return Status(
        standing.python,
        standing.version,
        built_from,
        _installed(),
        tuple(stamps),
        tuple(path for path in changed if path not in of_patches),
    )


def _as_built(target: Path) -> tuple[str | None, list[str]]:
    """What a built tree was made from, and the files edited since."""
    repository = Repository(target) if (target / ".git").is_dir() else None
    head = repository.ask("config", "--local", HEAD) if repository else None
    if repository is None or not head:
        return None, []
    base = repository.git("log", "--max-parents=0", "--format=%s", head).decode().strip()
    edited = repository.git("diff", "--name-only", "-z", "--no-renames", head).decode()
    return base, [path for path in edited.split("\0") if path]


def _installed() -> str | None:
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
