# SPDX-License-Identifier: Apache-2.0
"""A runnable patched SGLang: a pristine copy of the package as a small git repository."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from seam import stamp
from seam.errors import SeamError
from seam.gitrepo import Commit, Repository
from seam.layer import Layer, Outcome, Pristine

BRANCH = "pd-series"
KEY = "seam.key"
"""Git setting of a built tree: what it was built from."""
HEAD = "seam.head"
"""Git setting of a built tree: the commit it was built up to."""
SETTINGS = (("core.autocrlf", "false"), ("core.compression", "1"), ("gc.auto", "0"))
"""Bytes stay as they are, and speed goes before size."""
UNTRACKED = (".so", ".pyc")
"""Compiled files stand in the tree but not in git."""


class Package(Pristine, Protocol):
    """A whole pristine package."""

    label: str
    """Says in the base commit where the package is from."""


@dataclass(frozen=True)
class Plan:
    """What to build a tree from, all of it in memory already."""

    package: Package
    layer: Layer
    timestamp: int

    @property
    def commits(self) -> list[Commit]:
        """One commit for each patch that applies."""
        return commits(self.layer, self.timestamp)

    @property
    def key(self) -> str:
        """A digest of everything that makes the tree."""
        digest = hashlib.sha256(f"{self.package.label} {self.timestamp}\n".encode())
        for commit in self.commits:
            digest.update(commit.message.encode())
            for path, content in sorted(commit.files.items()):
                assert content is not None  # a tree begins without us
                digest.update(f"{path} {len(content)}\n".encode() + content)
        return digest.hexdigest()


def commits(layer: Layer, timestamp: int) -> list[Commit]:
    """One commit for each patch that applies, in order; files keep their mode."""
    modes = layer.pristine.is_executable
    return [
        Commit(
            result.commit_message,
            result.changes,
            timestamp,
            frozenset(path for path in result.changes if modes(path)),
        )
        for result in layer.results.values()
        if result.outcome is Outcome.APPLIED
    ]


def build(plan: Plan, target: Path, replace: bool = False) -> bool:
    """Build the tree at `target`; False when it was there already, as planned and unedited.

    Everything is written to a folder beside the target, which is renamed at the end. Raises
    `SeamError` when the target holds something else, or edits that would be lost.
    """
    target = target.absolute()
    try:
        standing = _standing(target, replace)
        if standing == plan.key:
            return False
        if standing:
            _refuse_own_files(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            fresh = Path(folder) / "tree"
            _write(plan, fresh)
            if target.exists():
                target.rename(Path(folder) / "old")
            fresh.rename(target)
    except OSError as error:
        raise SeamError(
            f"cannot build at {target}: {error.strerror}: {error.filename or target}"
        ) from error
    return True


def _standing(target: Path, replace: bool) -> str | None:
    """The key of the tree at `target` when it may be replaced, None when nothing is there."""
    there = next(folder for folder in (target, *target.parents) if folder.exists())
    if not there.is_dir():
        raise SeamError(f"{there} is not a folder; name one that does not exist yet")
    if there != target:
        return None
    if not any(target.iterdir()):
        return None
    repository = Repository(target)
    key = repository.ask("config", "--local", KEY) if (target / ".git").is_dir() else None
    if key is None:
        raise SeamError(f"{target} is not empty; name a folder that does not exist yet")
    if not replace:
        raise SeamError(f"{target} is a built tree already; --replace builds it anew")
    head = repository.ask("config", "--local", HEAD)
    edited = repository.ask("status", "--porcelain", "--untracked-files=no")
    refs = repository.ask("for-each-ref", "--format=%(objectname) %(refname)")
    if edited or refs != f"{head} refs/heads/{BRANCH}":
        raise SeamError(
            f"{target} was edited since it was built (files, commits, branches or a stash); "
            "save the edits and delete it"
        )
    return key


def _refuse_own_files(target: Path) -> None:
    """Somebody's own files would be lost; tests that were laid beside ours are copies."""
    untracked = Repository(target).git("ls-files", "--others", "--exclude-standard").decode()
    own = [path for path in untracked.splitlines() if not path.startswith("test/registered/")]
    if own:
        raise SeamError(f"{target} has files of yours: {', '.join(own[:3])}; move them away first")


def _write(plan: Plan, folder: Path) -> None:
    repository = Repository(folder.parent)
    repository.git("init", "--quiet", "--template=", f"--initial-branch={BRANCH}", str(folder))
    repository = Repository(folder)
    files, executables = _extract(plan.package, folder)
    base = Commit(f"sglang {plan.package.label}\n", files, plan.timestamp, executables)
    for key, value in (*SETTINGS, (KEY, plan.key)):
        repository.git("config", key, value)
    head = repository.write(BRANCH, [base, *plan.commits])
    repository.git("config", HEAD, head)
    info = folder / ".git" / "info"
    info.mkdir(exist_ok=True)
    (info / "exclude").write_text("".join(f"*{end}\n" for end in UNTRACKED) + "__pycache__/\n")
    for path, content in plan.layer.changed.items():
        _write_file(folder / path, content)
    repository.git("read-tree", "HEAD")
    repository.git("update-index", "-q", "--refresh")


def relay(plan: Plan, folder: Path, base: str, built: Callable[[str], bytes | None]) -> None:
    """Make the commits of a built tree those of the plan, on the pristine commit `base`.

    `built` gives a file as the tree was built. What differs from it on disk is an edit and stays
    one; stamps are generated and never do. Files come first and refs last, so that a run that was
    stopped can be repeated.
    """
    repository, fresh = Repository(folder), f"{BRANCH}-next"
    repository.ask("update-ref", "-d", f"refs/heads/{fresh}")
    head = repository.write(fresh, plan.commits, base)
    before = repository.git("diff", "--name-only", "--no-renames", "-z", base, "HEAD").decode()
    for path in {*filter(None, before.split("\0")), *plan.layer.changed}:
        file, wanted = folder / path, plan.layer.read(path)
        there = file.read_bytes() if file.is_file() else None
        if there == wanted or not (path.startswith(stamp.FOLDER) or there == built(path)):
            continue
        if wanted is None:
            file.unlink()
        else:
            _write_file(file, wanted)
    for key, value in ((KEY, plan.key), (HEAD, head)):
        repository.git("config", key, value)
    repository.git("update-ref", f"refs/heads/{BRANCH}", head)
    repository.git("update-ref", "-d", f"refs/heads/{fresh}")
    repository.git("read-tree", "HEAD")
    repository.git("update-index", "-q", "--refresh")


def _extract(package: Package, folder: Path) -> tuple[dict[str, bytes], frozenset[str]]:
    """Write the package to `folder`; returns what git is to keep of it."""
    kept: dict[str, bytes] = {}
    executables = set()
    for path in package.paths():
        content = package.read(path)
        assert content is not None
        _write_file(folder / path, content)
        if package.is_executable(path):
            (folder / path).chmod(0o755)
            executables.add(path)
        if not path.endswith(UNTRACKED):
            kept[path] = content
    return kept, frozenset(executables)


def _write_file(path: Path, content: bytes) -> None:
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        os.makedirs(parent)
    with open(path, "wb") as file:
        file.write(content)
