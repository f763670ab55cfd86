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
            run = subprocess.run(
                _pip_command(release, Path(folder)), capture_output=True, text=True, check=False
            )
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


def _pip_command(release: Release, folder: Path) -> list[str]:
    """Ask for the very file by its digest, whatever this interpreter could install itself."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{PACKAGE}=={release.name} --hash=sha256:{release.sha256}\n")
    tags = sorted(parse_wheel_filename(release.wheel)[3], key=str)
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
