# SPDX-License-Identifier: Apache-2.0
"""An older series taken out of a branch, so that a newer one can be laid in its place."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from seam.checkout import Checkout
from seam.errors import SeamError
from seam.gitrepo import Commit

SUBJECT = "pd-series: take the older series out"
WHY = "The commits above lay the newer one. Other commits of the branch stay as they are."
NOTHING = "0" * 40


class Laid(NamedTuple):
    """A commit that laid patches of a series."""

    name: str
    parents: list[str]
    patches: list[str]


class TakenOut:
    """A commit of a checkout less the patches it carries, as a pristine source.

    Each patch is taken out as `git revert` would: by what its commit changed, newest first,
    merged with what the branch changed since. The history is not rewritten.
    """

    def __init__(self, checkout: Checkout) -> None:
        """Take them out in memory; `SeamError` when one cannot be without touching other work."""
        self.checkout = checkout
        self.patches = [stamp.patch for stamp in checkout.carried()]
        self.changes: dict[str, bytes | None] = {}
        """Content of every file that differs from the commit, None when it is gone."""
        left = set(self.patches)
        for laid in _laid(checkout) if left else ():
            if left.intersection(laid.patches):
                self._revert(laid)
                left.difference_update(laid.patches)
        if left:
            raise SeamError(
                f"{checkout.label} carries {', '.join(sorted(left))}, but no commit below it has "
                "the trailer 'Seam:' of that name (were they squashed?); take them out by hand, or "
                "name a commit below them: --onto REF"
            )

    def read(self, path: str) -> bytes | None:
        """A file's content, None when there is no such file."""
        return self.changes[path] if path in self.changes else self.checkout.read(path)

    def paths(self) -> Iterable[str]:
        """All files of the package and of the registered tests."""
        gone = {path for path, content in self.changes.items() if content is None}
        return (path for path in self.checkout.paths() if path not in gone)

    def is_executable(self, path: str) -> bool:
        """Whether a file is executable."""
        return self.checkout.is_executable(path)

    def below(self, commits: list[Commit], result: Callable[[str], bytes | None]) -> list[Commit]:
        """`commits` on top of the one that takes everything out; none when all is as it was.

        `result` reads what they lead to.
        """
        paths = self.changes.keys() | {path for commit in commits for path in commit.files}
        if all(result(path) == self.checkout.read(path) for path in paths):
            return []
        return [self._commit(), *commits] if self.patches else commits

    def _commit(self) -> Commit:
        trailers = "".join(f"Seam-out: {name}\n" for name in self.patches)
        modes = self.checkout.is_executable
        return Commit(
            f"{SUBJECT}\n\n{WHY}\n\n{trailers}",
            self.changes,
            self.checkout.timestamp,
            frozenset(path for path in self.changes if modes(path)),
        )

    def _revert(self, laid: Laid) -> None:
        if len(laid.parents) != 1:
            raise SeamError(f"{laid.name[:10]} lays patches but is a merge; take it out by hand")
        for path, before, after in self._changed(laid):
            now = self.read(path)
            if now == after:
                self.changes[path] = before
            elif now != before:
                self.changes[path] = _merged(now, after, before)
                if self.changes[path] is None:
                    raise SeamError(
                        f"{path} was changed where {', '.join(laid.patches)} put its lines; take "
                        f"it out by hand first: git revert {laid.name[:10]}"
                    )

    def _changed(self, laid: Laid) -> Iterator[tuple[str, bytes | None, bytes | None]]:
        """Each file that a commit changed, with its content before and after."""
        repository = self.checkout.repository
        options = ("-r", "-z", "--no-renames", "--no-commit-id")
        listing = repository.git("diff-tree", *options, laid.parents[0], laid.name)
        fields = listing.decode(errors="surrogateescape").split("\0")
        for head, path in zip(fields[0::2], fields[1::2], strict=False):
            _, _, old, new, _ = head.split(" ")
            before, after = (None if n == NOTHING else self.checkout.blob(n) for n in (old, new))
            yield path, before, after


def _laid(checkout: Checkout) -> Iterator[Laid]:
    """The commits with a trailer of ours, newest first."""
    form = "%H%x09%P%x09%(trailers:key=Seam,valueonly,separator=%x20)"
    log = checkout.repository.git("log", f"--format={form}", "--grep=^Seam: ", checkout.commit)
    for line in log.decode(errors="replace").splitlines():
        name, parents, patches = line.split("\t")
        yield Laid(name, parents.split(), patches.split())


def _merged(now: bytes | None, base: bytes | None, other: bytes | None) -> bytes | None:
    """What came from `base` to `other`, made in `now`; None when the changes meet."""
    if now is None or base is None or other is None:
        return None
    with tempfile.TemporaryDirectory(prefix="seam-") as folder:
        paths = [Path(folder) / name for name in ("now", "base", "other")]
        for path, content in zip(paths, (now, base, other), strict=True):
            path.write_bytes(content)
        command = ["git", "merge-file", "-p", "-q", *map(str, paths)]
        run = subprocess.run(command, capture_output=True, check=False)
    return run.stdout if run.returncode == 0 else None
