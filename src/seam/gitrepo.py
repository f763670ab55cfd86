# SPDX-License-Identifier: Apache-2.0
"""Git: reading a commit's files, and writing commits without touching index or work tree."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seam.errors import SeamError

AUTHOR = "sglang-pd-series <sglang-pd-series@invalid>"
FILE, EXECUTABLE = "100644", "100755"


@dataclass(frozen=True)
class Commit:
    """A commit to be: its message and the files it writes, None for one that it takes away."""

    message: str
    files: Mapping[str, bytes | None]
    timestamp: int
    executables: frozenset[str] = field(default_factory=frozenset)


class Repository:
    """A git repository, driven through git's own commands."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("git") is None:
            raise SeamError("git is not installed, or not on the PATH; install it first")
        self.folder = folder

    def git(self, *args: str, stdin: bytes | None = None) -> bytes:
        """Output of a git command; `SeamError` with git's own words when it fails."""
        run = self._run(args, stdin)
        if run.returncode:
            reason = run.stderr.decode(errors="replace").strip()
            raise SeamError(f"git {args[0]} failed in {self.folder}: {reason}")
        return run.stdout

    def ask(self, *args: str) -> str | None:
        """Output of a git command, None when it fails."""
        run = self._run(args, None)
        return None if run.returncode else run.stdout.decode().strip()

    def has_branch(self, branch: str) -> bool:
        """Whether a local branch of that name exists; `SeamError` when none can."""
        if self.ask("check-ref-format", "--branch", branch) is None:
            raise SeamError(f"{branch!r} is not a name that git allows for a branch")
        return self.ask("rev-parse", "--verify", "--quiet", f"refs/heads/{branch}") is not None

    def stream(self, *args: str) -> subprocess.Popen[bytes]:
        """A git command that is talked to through its standard input and output."""
        return subprocess.Popen(
            ["git", "-C", str(self.folder), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
        )

    def _run(self, args: Sequence[str], stdin: bytes | None) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["git", "-C", str(self.folder), *args],
            input=stdin,
            stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True,
            env=_environment(),
            check=False,
        )

    def write(self, branch: str, commits: Iterable[Commit], parent: str | None = None) -> str:
        """Write `commits` on a new branch; the same input gives the same hashes.

        Git writes objects first and the branch last, so that a failure leaves no branch.
        """
        stream = b"".join(
            piece
            for at, commit in enumerate(commits)
            for piece in _commit_stream(branch, commit, parent if at == 0 else None)
        )
        # Without a search for deltas: it takes longer than all the rest.
        options = ("--quiet", "--done", "--date-format=raw", "--depth=0")
        self.git("fast-import", *options, stdin=stream + b"done\n")
        return self.git("rev-parse", f"refs/heads/{branch}").decode().strip()


def _environment() -> dict[str, str]:
    """Ours, less what would point git at another repository (set where a hook runs us)."""
    elsewhere = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY")
    kept = {key: value for key, value in os.environ.items() if key not in elsewhere}
    return {**kept, "LC_ALL": "C"}


def _commit_stream(branch: str, commit: Commit, parent: str | None) -> Iterable[bytes]:
    message = commit.message.encode()
    who = f"{AUTHOR} {commit.timestamp} +0000"
    yield f"commit refs/heads/{branch}\nauthor {who}\ncommitter {who}\n".encode()
    yield b"data %d\n%s\n" % (len(message), message)
    if parent:
        yield f"from {parent}\n".encode()
    for path, content in sorted(commit.files.items()):
        if content is None:
            yield f"D {_quoted(path)}\n".encode()
            continue
        mode = EXECUTABLE if path in commit.executables else FILE
        yield f"M {mode} inline {_quoted(path)}\n".encode()
        yield b"data %d\n%s\n" % (len(content), content)


def _quoted(path: str) -> str:
    if '"' in path or "\n" in path or path.startswith(" "):
        escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    return path
