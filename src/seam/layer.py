# SPDX-License-Identifier: Apache-2.0
"""The whole series laid over one pristine source in memory, before a byte is written anywhere."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from packaging.version import Version

from seam.errors import Kind, Misfit, SeamError
from seam.filelayer import FileResult, check_forbidden, resolve_file
from seam.names import check_names
from seam.resolve import Standing
from seam.seamfile import FilePatch, Op, Patch
from seam.source import Source
from seam.stamp import Stamp, telling

SRT = "python/sglang/srt/"


class Outcome(str, Enum):
    """What became of a patch on one release."""

    APPLIED = "applied"
    PRESENT = "present"
    UPSTREAM = "upstream"
    NOT_FOR_RELEASE = "not for this release"
    ERROR = "error"


class Pristine(Protocol):
    """An unpatched SGLang: a wheel, an installed package, or a commit of a checkout."""

    def read(self, path: str) -> bytes | None:
        """A file by its path in SGLang's checkout, None when there is none."""

    def paths(self) -> Iterable[str]:
        """All paths, as in SGLang's checkout."""

    def is_executable(self, path: str) -> bool:
        """Whether a file is executable."""


@dataclass(frozen=True)
class PatchResult:
    """A patch on one release: its outcome and, when applied, the files of its commit."""

    patch: Patch
    outcome: Outcome
    changes: dict[str, bytes] = field(default_factory=dict)
    """Path in a checkout to content, the stamp among them."""
    files: tuple[FileResult, ...] = ()
    misfits: tuple[Misfit, ...] = ()
    notes: tuple[str, ...] = ()
    stamp: Stamp | None = None

    @property
    def commit_message(self) -> str:
        """The message of the seam file, with the trailer that names the patch."""
        return f"{self.patch.message}Seam: {self.patch.name}\n"


class Layer:
    """Lays patches one by one; each sees the files as the earlier ones left them."""

    def __init__(
        self,
        pristine: Pristine,
        release: str,
        overlay: Callable[[str], bytes],
        carried: Iterable[Stamp] = (),
    ) -> None:
        """`overlay` gives the files that patches add; `carried` are stamps of what is there."""
        self.pristine = pristine
        self.carried = {stamp.patch: stamp for stamp in carried}
        self.release = release
        self.overlay = overlay
        self.results: dict[str, PatchResult] = {}
        self.changed: dict[str, bytes] = {}
        """Content of every file that differs from the pristine source."""
        self._pristine_sources: dict[str, Source] = {}
        self._sources: dict[str, Source] = {}

    def lay(self, patches: Iterable[Patch]) -> list[PatchResult]:
        """Lay `patches` in order; one that does not fit changes nothing."""
        return [self._lay(patch) for patch in patches]

    @property
    def misfits(self) -> list[tuple[Patch, Misfit]]:
        """Everything that does not fit."""
        return [(one.patch, misfit) for one in self.results.values() for misfit in one.misfits]

    def read(self, path: str) -> bytes | None:
        """A file as the patches laid so far leave it."""
        return self.changed[path] if path in self.changed else self.pristine.read(path)

    def _lay(self, patch: Patch) -> PatchResult:
        version = Version(self.release)
        files = [file for file in patch.files if version in file.releases]
        if version not in patch.releases or (patch.files and not files):
            result = PatchResult(patch, Outcome.NOT_FOR_RELEASE)
        else:
            try:
                result = self._resolve(patch)
            except Misfit as misfit:
                result = PatchResult(patch, Outcome.ERROR, misfits=(misfit,))
        self.results[patch.name] = result
        self.changed |= result.changes
        self._sources |= {SRT + file.after.path: file.after for file in result.files}
        return result

    def _resolve(self, patch: Patch) -> PatchResult:
        self._check_needs(patch)
        resolved, misfits = self._resolve_files(patch)
        if misfits:
            return PatchResult(patch, Outcome.ERROR, misfits=tuple(misfits))
        files = [result for _, result in resolved]
        added = self._added(patch)
        outcome = _outcome(patch, files, added)
        if outcome is not Outcome.APPLIED:
            return PatchResult(patch, outcome, notes=_notes(files))
        for file, result in resolved:
            check_forbidden(file, result.after)
        self._check_imports(patch, files, added)
        self._check_names(patch, files)
        edited = tuple(result for result in files if result.edits)
        changes = added | {SRT + result.after.path: result.after.content for result in edited}
        self._check_overlap(patch, changes)
        stamp = self._stamp(patch, added, edited)
        changes[stamp.path] = stamp.render()
        return PatchResult(patch, outcome, changes, edited, notes=_notes(files), stamp=stamp)

    def _resolve_files(
        self, patch: Patch
    ) -> tuple[list[tuple[FilePatch, FileResult]], list[Misfit]]:
        results, misfits = [], []
        for file in patch.files:
            if Version(self.release) not in file.releases:
                continue
            try:
                path = self._existing(file)
                if path is not None:
                    results.append((file, resolve_file(file, *self._source(path))))
                    continue
                if not all(hunk.optional for hunk in file.hunks):
                    names = ", ".join(file.paths)
                    raise Misfit(
                        Kind.NO_FILE, f"none of {names} is in this release", line=file.line
                    )
            except Misfit as misfit:
                misfits.append(self._with_move(misfit))
        return results, misfits

    def _existing(self, file: FilePatch) -> str | None:
        return next((path for path in file.paths if self.read(SRT + path) is not None), None)

    def _source(self, path: str) -> tuple[Source, Source]:
        """A file as it is now and as it was."""
        full = SRT + path
        if full not in self._pristine_sources:
            content = self.pristine.read(full)
            self._pristine_sources[full] = Source(content or b"", path)
        return self._sources.get(full, self._pristine_sources[full]), self._pristine_sources[full]

    def _added(self, patch: Patch) -> dict[str, bytes]:
        """The files of ours that are not there yet."""
        added = {}
        for path in patch.adds:
            try:
                ours = self.overlay(path)
            except SeamError as error:
                raise Misfit(Kind.NO_FILE, f"adds {error}") from error
            there = self.read(path)
            if there is None:
                added[path] = ours
            elif there != ours:
                raise Misfit(Kind.EXISTS, f"adds {path}: there is another file of that name")
        return added

    def _stamp(self, patch: Patch, added: dict[str, bytes], edited: Iterable[FileResult]) -> Stamp:
        modules = {path: content for path, content in added.items() if path.startswith("python/")}
        return Stamp(
            patch.name,
            patch.subject,
            self.release,
            {path: hashlib.sha256(content).hexdigest() for path, content in modules.items()},
            {
                SRT + file.after.path: telling(file.lines, file.before.content, file.after.content)
                for file in edited
            },
        )

    # checks --------------------------------------------------------------------------------

    def _check_needs(self, patch: Patch) -> None:
        for need in patch.needs:
            result = self.results.get(need)
            if need in self.carried:
                continue
            if result is None:
                raise Misfit(Kind.NEEDS, f"needs {need}, which is not laid before it")
            if result.outcome in (Outcome.ERROR, Outcome.NOT_FOR_RELEASE):
                raise Misfit(Kind.NEEDS, f"needs {need}, which is: {result.outcome.value}")

    def _closure(self, patch: Patch) -> list[PatchResult]:
        """What the patch may lean on: the results of all patches it needs, directly or not."""
        direct = [self.results[need] for need in patch.needs if need in self.results]
        return [*direct, *(below for result in direct for below in self._closure(result.patch))]

    def _check_imports(
        self, patch: Patch, files: Iterable[FileResult], added: dict[str, bytes]
    ) -> None:
        """Every module of SGLang that an import seam names must be there for the patch alone."""
        own = dict(added)
        for result in self._closure(patch):
            own |= result.changes

        def read(path: str) -> bytes | None:
            return own[path] if path in own else self.pristine.read(path)

        for seam in (edit.seam for file in files for edit in file.edits):
            for module in _missing_modules(seam.put.body, read) if seam.op is Op.IMPORT else ():
                raise Misfit(
                    Kind.NO_MODULE,
                    f"neither this release nor the patch, nor one it needs, has {module}",
                    "add it, or name the patch that adds it: 'needs: NAME'",
                    line=seam.line,
                )

    def _check_names(self, patch: Patch, files: Iterable[FileResult]) -> None:
        """Every name that `+` lines use must be bound in the file for the patch alone."""
        lent = [file for result in self._closure(patch) for file in result.files]
        for file in files:
            path = file.after.path
            borrowed = [e.seam for other in lent if other.after.path == path for e in other.edits]
            check_names(file, self._source(path)[1], borrowed)

    def _check_overlap(self, patch: Patch, changes: dict[str, bytes]) -> None:
        """Raise when the patch takes away what an earlier one put there."""
        stamps = [result.stamp for result in self.results.values() if result.stamp]

        def read(path: str) -> bytes | None:
            return changes[path] if path in changes else self.read(path)

        for stamp in (*self.carried.values(), *stamps):
            touched = not changes.keys().isdisjoint((*stamp.adds, *stamp.lines))
            for line in stamp.broken(read) if touched else ():
                raise Misfit(Kind.OVERLAP, f"rewrites what {stamp.patch} put there", line)

    def _with_move(self, misfit: Misfit) -> Misfit:
        """Add to a missing scope where a definition of that name is now."""
        found = re.match(r"no ([\w.]+) in ", misfit.headline)
        if misfit.kind is not Kind.NO_SCOPE or not found:
            return misfit
        places = list(self._definitions(found[1].rpartition(".")[2]))
        moved = [f"defined in {place}" for place in places[:3]]
        return Misfit(misfit.kind, misfit.lines[0], *misfit.lines[1:], *moved, line=misfit.line)

    def _definitions(self, name: str) -> Iterator[str]:
        mark = re.compile(rf"^\s*(?:class|(?:async\s+)?def)\s+{name}\b".encode(), re.MULTILINE)
        for path in sorted(self.pristine.paths()):
            if not (path.startswith(SRT) and path.endswith(".py")):
                continue
            content = self.pristine.read(path) or b""
            if mark.search(content):
                source = Source(content, path.removeprefix(SRT))
                for dotted, node in source.statements_with(name):
                    if getattr(node, "name", None) == name:
                        yield f"{source.path} :: {dotted}"


def _outcome(patch: Patch, files: list[FileResult], added: dict[str, bytes]) -> Outcome:
    """Imports follow the other hunks, and do not decide unless there are no others."""
    hunks = [result for file in files for result in file.hunks]
    deciding = [result for result in hunks if not result.hunk.is_import] or hunks
    standings = {result.standing for result in deciding} - {Standing.ABSENT}
    if patch.files and not standings:
        raise Misfit(Kind.NO_ANCHOR, "every hunk is optional and none has its place here")
    if Standing.APPLIED in standings:
        return Outcome.APPLIED
    if Standing.UPSTREAM in standings:
        return Outcome.UPSTREAM
    lacking = [path for path in added if path.startswith("python/") or not patch.files]
    return Outcome.APPLIED if lacking else Outcome.PRESENT


def _notes(files: Iterable[FileResult]) -> tuple[str, ...]:
    return tuple(result.note for file in files for result in file.hunks if result.note)


def _missing_modules(
    body: Iterable[ast.stmt], read: Callable[[str], bytes | None]
) -> Iterator[str]:
    """Names of modules of SGLang that import statements need and `read` does not find."""

    def source(dotted: str) -> bytes | None:
        base = "python/" + dotted.replace(".", "/")
        plain = read(f"{base}.py")
        return plain if plain is not None else read(f"{base}/__init__.py")

    for node in body:
        if isinstance(node, ast.Import):
            wanted = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            wanted = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in wanted:
            if module.partition(".")[0] != "sglang":
                continue
            if name and source(f"{module}.{name}") is not None:
                continue
            content = source(module)
            if content is None or (name and not re.search(rf"\b{name}\b".encode(), content)):
                yield f"{module}.{name}" if name else module
