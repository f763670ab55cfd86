# SPDX-License-Identifier: Apache-2.0
"""A tree that seam built, opened to see what was edited in it since."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from seam import stamp
from seam.checkout import Checkout
from seam.errors import SeamError
from seam.layer import Layer
from seam.series import Series
from seam.stamp import Stamp
from seam.tree import BRANCH, HEAD, Plan, relay


class BuiltTree:
    """The pristine commit, the commit that seam built up to, and the files as they stand now."""

    def __init__(self, folder: Path) -> None:
        """Open it; raise `SeamError` when it is none, or has commits of its own."""
        self.built = Checkout(folder, "HEAD")
        self.repository = self.built.repository
        self.folder = folder
        head = self.repository.ask("config", "--local", HEAD)
        if head is None:
            raise SeamError(f"{folder} is not a tree that seam built: no {HEAD} in its settings")
        branch = self.repository.ask("symbolic-ref", "--short", "HEAD")
        if branch != BRANCH or self.built.commit != head:
            raise SeamError(
                f"{folder} has commits of its own; make them edits again: "
                f"git -C {folder} checkout -B {BRANCH} && git -C {folder} reset --soft {head[:10]}"
            )
        (base,) = self.repository.git("rev-list", "--max-parents=0", head).decode().split()
        self.pristine = Checkout(folder, base)
        subject = self.repository.git("log", "-1", "--format=%s", base).decode().strip()
        self.label = subject.removeprefix("sglang ")
        self.stamps: list[Stamp] = self.built.carried()
        if not self.stamps:
            raise SeamError(f"{folder} carries no patch of the series")

    @property
    def release(self) -> str:
        """The release it was built from."""
        return self.stamps[0].release

    def ours(self, series: Series, path: str) -> bytes:
        """A file that a patch adds: as it stands here if it was edited or is new, else ours."""
        here = self.read(path)
        if here is not None and here != self.built.read(path):
            return here
        return series.overlay(path)

    def read(self, path: str) -> bytes | None:
        """A file as it stands now, None when there is none."""
        file = self.folder / path
        return file.read_bytes() if file.is_file() else None

    def edited(self) -> list[str]:
        """Files that differ from the commit, deleted ones among them; stamps are generated."""
        told = self.repository.git("diff", "--name-only", "--no-renames", "-z", "HEAD").decode()
        return [path for path in told.split("\0") if path and not _is_stamp(path)]

    def new(self) -> Iterator[str]:
        """Files that no commit has, in the folders where SGLang has its modules and tests."""
        told = self.repository.git("ls-files", "--others", "--exclude-standard", "-z").decode()
        for path in filter(None, told.split("\0")):
            if path.startswith(("python/sglang/", "test/registered/")) and not _is_stamp(path):
                yield path

    def order_imports(self, layer: Layer) -> None:
        """Put imports where `layer` has them, in files that differ from it in nothing else."""
        for path in self.edited():
            here, laid = self.read(path), layer.read(path)
            if here and laid and here != laid and _less_imports(here) == _less_imports(laid):
                (self.folder / path).write_bytes(laid)

    def relay(self, layer: Layer) -> None:
        """Make the commits those of `layer`; files with edits that it does not have keep them."""
        plan = Plan(_Base(self.pristine, self.label), layer, self.pristine.timestamp)
        relay(plan, self.folder, self.pristine.commit, self.built.read)

    def close(self) -> None:
        """End the reading processes."""
        self.built.close()
        self.pristine.close()

    def __enter__(self) -> BuiltTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Base:
    """The pristine commit as the package that a plan is made from."""

    def __init__(self, checkout: Checkout, label: str) -> None:
        self.label = label
        self.read = checkout.read
        self.paths = checkout.paths
        self.is_executable = checkout.is_executable


def _is_stamp(path: str) -> bool:
    return path.startswith(stamp.FOLDER + "/") and not path.endswith("__init__.py")


def _less_imports(content: bytes) -> tuple[list[bytes], list[bytes]]:
    """The lines that are no top-level import, in order, and those that are, sorted."""
    lines = content.splitlines(keepends=True)
    imports = [line for line in lines if line.startswith((b"import ", b"from "))]
    return [line for line in lines if line not in imports], sorted(imports)
