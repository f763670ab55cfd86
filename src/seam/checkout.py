# SPDX-License-Identifier: Apache-2.0
"""A commit of somebody's SGLang checkout, read from git objects and never from the work tree."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from seam import stamp
from seam.errors import SeamError
from seam.gitrepo import EXECUTABLE, Repository
from seam.stamp import Stamp
from seam.version import literal_version

ROOTS = ("python/sglang", "test/registered")
"""What of a checkout is looked at."""


class Blob(NamedTuple):
    """A file of a commit."""

    mode: str
    name: str


class Checkout:
    """A commit of a checkout as a pristine source."""

    def __init__(self, folder: Path, ref: str) -> None:
        """Open `ref`; raise `SeamError` when the folder or the ref is not SGLang's."""
        if not folder.is_dir():
            raise SeamError(f"{folder} is not a folder")
        self.repository = Repository(folder)
        try:
            self.repository.git("rev-parse", "--git-dir")
        except SeamError as error:
            raise SeamError(f"{folder} is not a git checkout ({error})") from error
        commit = self.repository.ask("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
        if not commit:
            raise SeamError(f"{folder} has no commit {ref!r}")
        self.commit = commit
        if not any(path.startswith("python/sglang/srt/") for path in self.paths()):
            raise SeamError(f"{folder} at {ref} is not SGLang: it has no python/sglang/srt")
        self._reader: subprocess.Popen[bytes] | None = None

    @property
    def label(self) -> str:
        """The commit, as short as git would write it."""
        return self.repository.git("rev-parse", "--short=10", self.commit).decode().strip()

    @property
    def timestamp(self) -> int:
        """When the commit was made, in seconds since the epoch."""
        return int(self.repository.git("log", "-1", "--format=%ct", self.commit))

    @cached_property
    def _blobs(self) -> dict[str, Blob]:
        listing = self.repository.git("ls-tree", "-r", "-z", "--full-tree", self.commit, *ROOTS)
        blobs = {}
        for entry in filter(None, listing.decode(errors="surrogateescape").split("\0")):
            head, _, path = entry.partition("\t")
            mode, kind, name = head.split(" ")
            if kind == "blob" and mode.startswith("100"):
                blobs[path] = Blob(mode, name)
        return blobs

    def paths(self) -> Iterable[str]:
        """All files of the package and of the registered tests."""
        return self._blobs.keys()

    def is_executable(self, path: str) -> bool:
        """Whether the commit marks a file as executable."""
        blob = self._blobs.get(path)
        return blob is not None and blob.mode == EXECUTABLE

    def read(self, path: str) -> bytes | None:
        """A file's content, None when the commit has no such file."""
        blob = self._blobs.get(path)
        return None if blob is None else self.blob(blob.name)

    def blob(self, name: str) -> bytes:
        """The content of a blob, by its hash."""
        if self._reader is None:
            self._reader = self.repository.stream("cat-file", "--batch")
        assert self._reader.stdin is not None and self._reader.stdout is not None
        self._reader.stdin.write(name.encode() + b"\n")
        self._reader.stdin.flush()
        size = int(self._reader.stdout.readline().split()[2])
        return self._reader.stdout.read(size + 1)[:-1]

    def carried(self) -> list[Stamp]:
        """The stamps of the patches that the commit carries already."""
        folder = stamp.FOLDER + "/"
        paths = [p for p in self.paths() if p.startswith(folder) and not p.endswith("__init__.py")]
        return [stamp.parse(self.read(path) or b"", path) for path in paths]

    def release(self) -> str:
        """The release the commit is based on: its version module, else the nearest tag below it."""
        for name in ("_version.py", "version.py"):
            content = self.read(f"python/sglang/{name}")
            version = literal_version(content) if content else None
            if version:
                return version
        tag = self.repository.ask(
            "describe", "--tags", "--abbrev=0", "--match=v[0-9]*", self.commit
        )
        try:
            return str(Version((tag or "").removeprefix("v")))
        except InvalidVersion as error:
            raise SeamError(
                f"cannot tell which release {self.label} is based on: no literal version and no "
                "tag vX.Y.Z below it; say it: --release R"
            ) from error

    def close(self) -> None:
        """End the reading process."""
        if self._reader is not None:
            self._reader.communicate()

    def __enter__(self) -> Checkout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
