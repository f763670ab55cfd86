# SPDX-License-Identifier: Apache-2.0
"""The series: its patches in order, the releases it is carried over, and where both are kept."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timezone
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from seam.errors import SeamError
from seam.seamfile import NAME, Patch, parse

# The standard library has it from 3.11 on; tomli is the same module for 3.10.
tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

PACKAGED = Path(__file__).parents[1] / "sglang_pd_series"


@dataclass(frozen=True)
class Release:
    """One supported SGLang release and the wheel it is taken from."""

    name: str
    wheel: str
    sha256: str
    released: date
    requires_python: str
    torch: str
    """The torch it pins; for information, a run without a GPU may take another."""
    pins: tuple[str, ...]
    """Requirements that a run of this release needs at these very versions."""
    stand_ins: tuple[str, ...] = ()
    """Packages that must be importable, but of which nothing is used."""

    @property
    def version(self) -> Version:
        """The release as a version, for ordering."""
        return Version(self.name)

    @property
    def label(self) -> str:
        """A short name for the head of a column: 0.5.13.post1 is 13.p1."""
        return self.name.removeprefix("0.5.").replace(".post", ".p")

    @property
    def timestamp(self) -> int:
        """Seconds since the epoch, the date of commits that stand for this release."""
        return int(datetime.combine(self.released, time(), timezone.utc).timestamp())


@dataclass(frozen=True)
class Selection:
    """Patches to lay, in order of application."""

    patches: list[Patch]
    pulled: list[str]
    """Not asked for, but needed by one that was."""
    dropped: list[str]
    """Left out because they need one that was to be left out."""

    def remarks(self, carried: Iterable[str] = ()) -> list[str]:
        """What the user must be told about it; `carried` is there already."""
        pulled = ", ".join(name for name in self.pulled if name not in carried)
        dropped = ", ".join(self.dropped)
        return [
            *([f"also laid, because others need them: {pulled}"] if pulled else []),
            *([f"also left out, because they need what is: {dropped}"] if dropped else []),
        ]


@dataclass(frozen=True)
class Series:
    """All patches in order of application, and the files they add."""

    root: Path
    """Holds `series/`, `python/` and `test/registered/`."""
    patches: tuple[Patch, ...]
    releases: dict[str, Release]
    """By name, oldest first."""

    @classmethod
    def load(cls, root: Path | None = None) -> Series:
        """Read the whole series; raise `SeamError` at the first file that is malformed."""
        root = root or find_root()
        folder = root / "series"
        releases = read_releases(folder / "releases.toml")
        patches = [_read_patch(folder, name) for name in _order(folder / "series")]
        _check_needs(patches)
        return cls(root, tuple(patches), {release.name: release for release in releases})

    @property
    def newest(self) -> Release:
        """The newest supported release."""
        return list(self.releases.values())[-1]

    def release(self, name: str) -> Release:
        """The supported release called `name`, or a `SeamError` that lists them."""
        if name in self.releases:
            return self.releases[name]
        raise SeamError(f"unknown release {name!r}; supported are: {', '.join(self.releases)}")

    def patch(self, name: str) -> Patch:
        """The patch called `name`, or a `SeamError` that lists them."""
        for patch in self.patches:
            if patch.name == name:
                return patch
        known = ", ".join(patch.name for patch in self.patches) or "none"
        raise SeamError(f"unknown patch {name!r}; the series has: {known}")

    def select(self, names: Sequence[str] = (), without: Sequence[str] = ()) -> Selection:
        """The patches called `names`, all if there are none, with what they need.

        A patch in `without` is left out, and so are those that need it; `SeamError` when one of
        those was asked for by name.
        """
        left_out = {self.patch(name).name for name in without}
        for patch in self.patches:
            if left_out & set(patch.needs):
                left_out.add(patch.name)
        asked = {self.patch(name).name for name in names}
        if asked & left_out:
            name = sorted(asked & left_out)[0]
            raise SeamError(f"{name} cannot be laid without {', '.join(without)}")
        chosen = asked or {patch.name for patch in self.patches} - left_out
        pulled: set[str] = set()
        for patch in reversed(self.patches):
            if patch.name in chosen | pulled:
                pulled |= set(patch.needs) - chosen
        return Selection(
            patches=[patch for patch in self.patches if patch.name in chosen | pulled],
            pulled=[patch.name for patch in self.patches if patch.name in pulled],
            dropped=[p.name for p in self.patches if p.name in left_out.difference(without)],
        )

    def overlay(self, path: str) -> bytes:
        """A file of ours, by its path in SGLang's checkout; `SeamError` when there is none."""
        try:
            return (self.root / path).read_bytes()
        except OSError as error:
            raise SeamError(f"{path}: no such file under {self.root}") from error


def store(root: Path, files: Mapping[str, bytes]) -> None:
    """Write files of the repository, all or none; `SeamError` when one cannot be written."""
    if root == PACKAGED:
        raise SeamError(f"{root} is an installed series; run this in a clone of its repository")
    fresh: list[tuple[Path, Path]] = []
    try:
        for path, content in files.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            beside = target.with_name(f".{target.name}.new")
            fresh.append((beside, target))
            beside.write_bytes(content)
            if target.exists():
                shutil.copymode(target, beside)
        for beside, target in fresh:
            beside.replace(target)
    except OSError as error:
        raise SeamError(f"cannot write {error.filename}: {error.strerror}") from error
    finally:
        for beside, _ in fresh:
            beside.unlink(missing_ok=True)


def find_root(start: Path | None = None) -> Path:
    """Where the series is kept: the repository around `start` or this module, else the package."""
    start = (start or Path.cwd()).resolve()
    source = Path(__file__).resolve().parents[2]
    for candidate in (start, *start.parents, source):
        if (candidate / "src" / "seam").is_dir() and _holds_series(candidate):
            return candidate
    if _holds_series(PACKAGED):
        return PACKAGED
    raise SeamError(
        f"no series found: neither {start} is in its repository nor does {PACKAGED} hold one; "
        "install the package again"
    )


def _holds_series(root: Path) -> bool:
    return (root / "series" / "series").is_file() and (root / "series" / "releases.toml").is_file()


def _order(path: Path) -> list[str]:
    names: list[str] = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        name = line.partition("#")[0].strip()
        if not name:
            continue
        if not NAME.fullmatch(name):
            raise SeamError(f"series/series:{number}: {name!r} is no name of a patch (a-z, 0-9, -)")
        if name in names:
            raise SeamError(f"series/series:{number}: {name} is listed above already")
        names.append(name)
    return names


def _read_patch(folder: Path, name: str) -> Patch:
    path = folder / f"{name}.seam"
    if not path.is_file():
        raise SeamError(f"series/series names {name}, but there is no series/{name}.seam")
    return parse(name, _read(path))


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise SeamError(f"{path}: not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise SeamError(f"{path}: {error.strerror}") from error


def _check_needs(patches: Iterable[Patch]) -> None:
    earlier: set[str] = set()
    for patch in patches:
        for need in patch.needs:
            if need not in earlier:
                raise SeamError(
                    f"{patch.name}.seam: needs {need}, which does not come earlier in series/series"
                )
        earlier.add(patch.name)


def read_releases(path: Path) -> list[Release]:
    """Read releases.toml, oldest release first; raise `SeamError` when it is malformed."""
    try:
        table = tomllib.loads(_read(path))
        releases = [_read_release(entry) for entry in table["release"]]
    except (tomllib.TOMLDecodeError, KeyError, TypeError, InvalidVersion) as error:
        raise SeamError(f"{path}: {error!r}") from error
    return sorted(releases, key=lambda release: release.version)


def _read_release(entry: dict[str, object]) -> Release:
    released = entry["released"]
    if not isinstance(released, date):
        raise TypeError(f"released = {released!r} is no date")
    Version(str(entry["version"]))
    return Release(
        name=str(entry["version"]),
        wheel=str(entry["wheel"]),
        sha256=str(entry["sha256"]),
        released=released,
        requires_python=str(entry["requires-python"]),
        torch=str(entry["torch"]),
        pins=_strings(entry["pins"]),
        stand_ins=_strings(entry.get("stand-ins", [])),
    )


def _strings(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return tuple(str(item) for item in value)
