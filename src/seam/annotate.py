# SPDX-License-Identifier: Apache-2.0
"""Which patch and hunk put a line of a built tree or of a release branch there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.version import Version

from seam import stamp
from seam.errors import Misfit, SeamError
from seam.filelayer import resolve_file
from seam.gitrepo import Repository
from seam.layer import SRT
from seam.seamfile import Patch
from seam.series import Series
from seam.source import Source

UNCOMMITTED = "0" * 40
"""What git blames for a line that no commit has."""


@dataclass(frozen=True)
class Blame:
    """A line of a file and the commit that it came with."""

    number: int
    text: str
    commit: str
    path: str
    """The file's name in that commit."""
    line: int
    """The line's number in that commit."""


@dataclass(frozen=True)
class Origin:
    """Where a line comes from."""

    number: int
    text: str
    owner: str
    """The patch; empty when the line is not the series'."""
    seam_line: int = 0
    """The `+` line's hunk in the seam file; 0 when it is a file of ours or cannot be told."""
    note: str = ""


def annotate(series: Series, file: Path, line: int | None) -> list[Origin]:
    """The origin of a line, or of every line; raise `SeamError` when git does not know the file."""
    if not file.is_file():
        raise SeamError(f"{file} is not a file")
    repository = Repository(file.absolute().parent)
    if repository.ask("ls-files", "--error-unmatch", "--", file.name) is None:
        raise SeamError(f"{file} is in no git repository, or not tracked by it")
    blamed = list(_blame(repository, file, line))
    owner = cache(lambda commit: _owner(repository, commit))
    seams = cache(lambda commit, path: _seams(series, repository, commit, path, owner(commit)))
    origins = []
    for one in blamed:
        if one.commit == UNCOMMITTED:
            origins.append(Origin(one.number, one.text, "", note="edited, in no commit yet"))
            continue
        name = owner(one.commit)
        known, note = seams(one.commit, one.path) if name else ({}, "")
        origins.append(Origin(one.number, one.text, name, known.get(one.line, 0), note))
    return origins


def _blame(repository: Repository, file: Path, line: int | None) -> Iterator[Blame]:
    only = [f"-L{line},{line}"] if line else []
    told = repository.git("blame", "--porcelain", *only, "--", file.name)
    paths: dict[str, str] = {}
    commit, numbers = "", (0, 0)
    for raw in told.decode(errors="replace").split("\n"):
        word, _, rest = raw.partition(" ")
        if raw.startswith("\t"):
            yield Blame(numbers[1], raw[1:], commit, paths[commit], numbers[0])
        elif len(word) == len(UNCOMMITTED):
            commit = word
            numbers = (int(rest.split()[0]), int(rest.split()[1]))
        elif word == "filename":
            paths[commit] = rest


def _owner(repository: Repository, commit: str) -> str:
    told = repository.git("log", "-1", "--format=%(trailers:key=Seam,valueonly)", commit)
    return told.decode().strip()


def _seams(
    series: Series, repository: Repository, commit: str, path: str, name: str
) -> tuple[dict[int, int], str]:
    """Line of the committed file to line of the seam file, found by laying the patch again."""
    before, after = _show(repository, f"{commit}^", path), _show(repository, commit, path)
    if before is None or after is None:
        return {}, "a file that it adds"
    try:
        patch = series.patch(name)
        stamped = _show(repository, commit, stamp.path_of(name))
        release = stamp.parse(stamped, name).release if stamped else series.newest.name
        pristine = _without_our_imports(repository, f"{commit}^", path, before)
        lines = _lay(patch, path.removeprefix(SRT), before, pristine, after, Version(release))
    except SeamError as error:
        return {}, str(error).partition("\n")[0]
    return lines, "" if lines else "its seam file reads otherwise now"


def _show(repository: Repository, ref: str, path: str) -> bytes | None:
    told = repository.ask("rev-parse", "--verify", "--quiet", f"{ref}:{path}")
    return repository.git("cat-file", "blob", told) if told else None


def _without_our_imports(repository: Repository, ref: str, path: str, content: bytes) -> bytes:
    """A file less the imports that the series put there: they decide where the next one goes."""
    stamps = repository.ask("ls-tree", "--full-tree", "--name-only", ref, f"{stamp.FOLDER}/") or ""
    ours: set[str] = set()
    for name in stamps.splitlines():
        if not name.endswith("__init__.py"):
            there = stamp.parse(_show(repository, ref, name) or b"", name)
            ours |= there.lines.get(path, {}).keys()
    lines = content.splitlines(keepends=True)
    imports = (b"import ", b"from ")
    return b"".join(
        line
        for line in lines
        if not (line.startswith(imports) and line.decode(errors="replace").strip() in ours)
    )


def _lay(
    patch: Patch, path: str, before: bytes, pristine: bytes, after: bytes, release: Version
) -> dict[int, int]:
    """As `_seams`; empty when the patch does not give the committed file any more."""
    for file in patch.files:
        if path not in file.paths or release not in file.releases:
            continue
        try:
            result = resolve_file(file, Source(before, path), Source(pristine, path))
        except Misfit:
            continue
        if result.after.content == after:
            return {
                line: edit.seam.put_lines[0]
                for edit, span in zip(result.edits, result.spans, strict=True)
                for line in range(
                    result.after.line_number(span.start),
                    result.after.line_number(max(span.start, span.end - 1)) + 1,
                )
            }
    return {}
