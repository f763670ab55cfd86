# SPDX-License-Identifier: Apache-2.0
"""SGLang as it is installed: a pristine source once RECORD vouches for it, and its stamps."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.metadata import Distribution
from pathlib import Path

from seam import stamp
from seam.errors import SeamError
from seam.stamp import Stamp
from seam.version import literal_version
from seam.wheels import PACKAGE

FROM_PACKAGE = "installed, verified against its RECORD"
"""Says in a tree's first commit that it was built from the installed package."""
SHOWN = 10
"""Most changed files that an error names."""


class Installed:
    """An installed distribution, read only after every file of it was found unchanged."""

    def __init__(self, name: str) -> None:
        """Verify the distribution `name`; `SeamError` names the files that differ from RECORD."""
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            raise SeamError(f"no package {name!r} is installed for this interpreter") from error
        self.version = distribution.version
        self.label = f"{self.version} ({FROM_PACKAGE})"
        self._files: dict[str, bytes] = {}
        self._executables: set[str] = set()
        changed = []
        for entry, located, content in _recorded(distribution):
            if content is None:
                changed.append(entry)
                continue
            path = f"python/{entry}"
            self._files[path] = content
            if located.stat().st_mode & 0o100:
                self._executables.add(path)
        if changed:
            more = [f"and {len(changed) - SHOWN} more"] if len(changed) > SHOWN else []
            raise SeamError(
                f"the installed {name} {self.version} was changed; install it again. "
                "Files that differ from its RECORD:\n  " + "\n  ".join([*changed[:SHOWN], *more])
            )
        if f"python/{PACKAGE}/version.py" not in self._files:
            raise SeamError(
                f"{name} {self.version} does not carry the files of {PACKAGE} (an editable "
                "install?); lay the series over its checkout: seam am CHECKOUT"
            )

    def paths(self) -> Iterable[str]:
        """All files of the package, as in SGLang's checkout."""
        return self._files.keys()

    def read(self, path: str) -> bytes | None:
        """A file's content, None when the package has no such file."""
        return self._files.get(path)

    def is_executable(self, path: str) -> bool:
        """Whether a file is executable."""
        return path in self._executables


def _recorded(distribution: Distribution) -> Iterator[tuple[str, Path, bytes | None]]:
    """The files of the package by its RECORD, with their content; None when it is another."""
    # `distribution.files` leaves missing files out, from Python 3.12 on.
    record = (distribution.read_text("RECORD") or "").splitlines()
    for entry, wanted, *_ in csv.reader(record):
        if entry.startswith(f"{PACKAGE}/") and wanted:
            located = Path(str(distribution.locate_file(entry)))
            content = located.read_bytes() if located.is_file() else None
            same = content is not None and _digest(content, wanted) == wanted
            yield entry, located, content if same else None


def record_changes(name: str, python: Path) -> list[str]:
    """Files of the package `name` that differ from its RECORD, if `python` is where it is."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return []
    if Path(str(distribution.locate_file(""))).resolve() != python:
        return []
    return [entry for entry, _, content in _recorded(distribution) if content is None]


def _digest(content: bytes, like: str) -> str:
    """The digest of a file the way RECORD writes it, by the method that `like` names."""
    method = like.partition("=")[0]
    digest = base64.urlsafe_b64encode(hashlib.new(method, content).digest())
    return f"{method}={digest.rstrip(b'=').decode()}"


class Standing:
    """The SGLang of a folder or of this interpreter, and the stamps it carries."""

    def __init__(self, folder: Path | None) -> None:
        """Find it under `folder` (a tree, a checkout), else where this interpreter imports it."""
        self.python = _find(folder) if folder else _imported()
        self.stamps: list[Stamp] = stamp.read_all(self.python)

    @property
    def version(self) -> str:
        """The release it says it is."""
        for name in ("_version.py", "version.py"):
            content = self.read(f"python/{PACKAGE}/{name}")
            version = literal_version(content) if content else None
            if version:
                return version
        return "of unknown release"

    def read(self, path: str) -> bytes | None:
        """A file by its path in a checkout, None when there is none."""
        file = self.python / path.removeprefix("python/")
        return file.read_bytes() if file.is_file() else None


def _find(folder: Path) -> Path:
    for python in (folder / "python", folder):
        if (python / PACKAGE / "srt").is_dir():
            return python.resolve()
    raise SeamError(f"there is no SGLang in {folder}: neither python/{PACKAGE} nor {PACKAGE}")


def _imported() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    locations = list(spec.submodule_search_locations or []) if spec else []
    for location in locations:
        if (Path(location) / "srt").is_dir():
            return Path(location).resolve().parent
    raise SeamError(f"this interpreter has no {PACKAGE}; name a tree: seam status DIR")
