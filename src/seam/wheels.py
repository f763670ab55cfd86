# SPDX-License-Identifier: Apache-2.0
"""SGLang's published wheels: fetched by name into a cache, verified, and read in place."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from packaging.utils import parse_wheel_filename

from seam.errors import SeamError
from seam.series import Release

PACKAGE = "sglang"
OFFLINE_HELP = "put the file there by hand, or set SEAM_CACHE to a folder that has it"


def cache() -> Path:
    """The folder of wheels: `$SEAM_CACHE`, else one in the user's cache."""
    named = os.environ.get("SEAM_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "sglang-pd-series" / "wheels"


def fetch(release: Release) -> Path:
    """The wheel of a release, from the cache or through pip; its sha256 is always checked."""
    path = cache() / release.wheel
    if not path.is_file():
        _download(release, path)
    _verify(path, release)
    return path


def find(version: str, like: Release) -> Path:
    """The wheel of a version whose digest nobody has written down yet.

    It is looked for in the cache, then fetched through pip for the interpreter and the platform
    that the wheel of `like` is for. Raises `SeamError` when there is none, or more than one.
    """
    there = sorted(cache().glob(f"{PACKAGE}-{version}-*.whl"))
    if len(there) > 1:
        raise SeamError(f"{cache()} has several wheels of {version}; leave one there")
    if not there:
        _download_new(version, like)
        there = sorted(cache().glob(f"{PACKAGE}-{version}-*.whl"))
    return there[0]


def is_cached(release: Release) -> bool:
    """Whether the wheel can be had without a network."""
    return (cache() / release.wheel).is_file()


def _verify(path: Path, release: Release) -> None:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != release.sha256:
        raise SeamError(
            f"{path} is not the wheel of {release.name}\n"
            f"  sha256 wanted {release.sha256}\n"
            f"  sha256 found  {digest.hexdigest()}\n"
            "  delete the file to have it fetched again"
        )


def _download(release: Release, path: Path) -> None:
    """Fetch into a folder beside the target, verify, then rename: the cache is never half full."""
    if importlib.util.find_spec("pip") is None:
        raise SeamError(
            f"{release.wheel} is not in {path.parent} and this interpreter has no pip to fetch it\n"
            f"  run `{sys.executable} -m ensurepip`, or {OFFLINE_HELP}"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
            wanted = f"{PACKAGE}=={release.name} --hash=sha256:{release.sha256}"
            command = _pip_command(release.wheel, wanted, Path(folder))
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            fetched = Path(folder) / release.wheel
            if run.returncode or not fetched.is_file():
                reason = (run.stderr.strip() or run.stdout.strip()).splitlines()[-1:]
                raise SeamError(
                    f"pip could not fetch {release.wheel}: {' '.join(reason) or 'no such file'}\n"
                    f"  {OFFLINE_HELP} ({path.parent})"
                )
            _verify(fetched, release)
            fetched.replace(path)
    except OSError as error:
        raise SeamError(
            f"cannot write to the wheel cache {path.parent}: {error.strerror}"
        ) from error


def _download_new(version: str, like: Release) -> None:
    """As `_download`, but what the index has is taken; pip compares it with the index's digest."""
    if importlib.util.find_spec("pip") is None:
        raise SeamError(f"this interpreter has no pip to fetch {PACKAGE} {version}; {OFFLINE_HELP}")
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache(), prefix=".fetch-") as folder:
        command = _pip_command(like.wheel, f"{PACKAGE}=={version}", Path(folder))
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        fetched = sorted(Path(folder).glob("*.whl"))
        if run.returncode or not fetched:
            reason = (run.stderr.strip() or run.stdout.strip()).splitlines()[-1:]
            raise SeamError(
                f"pip could not fetch {PACKAGE} {version}: {' '.join(reason) or 'no wheel'}\n"
                f"  {OFFLINE_HELP} ({cache()})"
            )
        fetched[0].replace(cache() / fetched[0].name)


def _pip_command(wheel: str, wanted: str, folder: Path) -> list[str]:
    """Ask for a file for the tags that `wheel` has, whatever this interpreter could install."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{wanted}\n")
    tags = sorted(parse_wheel_filename(wheel)[3], key=str)
    tag = tags[0]
    version = tag.interpreter[2:]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--ignore-requires-python"]
    command += ["--python-version", version, "--implementation", tag.interpreter[:2]]
    command += ["--abi", tag.abi, "--platform", tag.platform]
    return [*command, "--dest", str(folder), "--requirement", str(requirement)]


class Wheel:
    """A verified wheel as a pristine source; paths are as in SGLang's checkout."""

    def __init__(self, release: Release) -> None:
        """Open the wheel of a release, fetching it first when it is not in the cache."""
        self.archive = zipfile.ZipFile(fetch(release))
        self.label = f"{release.name} (wheel sha256 {release.sha256})"

    @cached_property
    def _names(self) -> dict[str, zipfile.ZipInfo]:
        return {
            f"python/{info.filename}": info
            for info in self.archive.infolist()
            if info.filename.startswith(f"{PACKAGE}/") and not info.is_dir()
        }

    def paths(self) -> Iterable[str]:
        """All files of the package."""
        return self._names.keys()

    def read(self, path: str) -> bytes | None:
        """A file's content, None when the wheel has no such file."""
        info = self._names.get(path)
        return None if info is None else self.archive.read(info)

    def is_executable(self, path: str) -> bool:
        """Whether the wheel marks a file as executable."""
        info = self._names.get(path)
        return info is not None and bool((info.external_attr >> 16) & 0o100)

    def __enter__(self) -> Wheel:
        return self

    def __exit__(self, *_: object) -> None:
        self.archive.close()
