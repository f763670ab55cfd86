# SPDX-License-Identifier: Apache-2.0
"""The seam file: a commit message, `---`, then what the patch adds and where it hooks in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePosixPath
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from seam.errors import Misfit, SeamError
from seam.pattern import (
    Pattern,
    Replacement,
    compile_pattern,
    compile_replacement,
    hole_names,
)

ANCHOR_LIMIT = 100
"""Most characters of an anchor; a longer one leans on too much."""
PLUS_LIMIT = 6
"""Most `+` lines of a hunk; more belong in a module of ours."""

HUNK = re.compile(r"@@(?P<optional>\?)? (?P<other>or )?(?P<scope>[\w.]+)(?: x(?P<times>[1-9]\d*))?")
RANGE = re.compile(r"(?P<first>[^\s.]\S*)?\s*\.\.(?!\S)\s*(?P<last>\S+)?")
TRAILER = re.compile(r"(?P<key>[A-Za-z][A-Za-z-]*): (?P<value>.*\S)")
NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
ADDABLE = ("python/sglang/srt/", "test/registered/")
IMPORT_SCOPE = "import"


class Op(Enum):
    """What a seam does at its anchor."""

    REPLACE = "replace"
    BEFORE = "before"
    AFTER = "after"
    TOP = "top"
    DECORATE = "decorate"
    IMPORT = "import"


@dataclass(frozen=True)
class Seam:
    """One anchor and the lines that go there."""

    op: Op
    scope: str
    put: Replacement
    anchor: Pattern | None
    inside: tuple[Pattern, ...]
    """Heads of the statements around the anchor, outermost first."""
    cures: tuple[Pattern, ...]
    """What upstream's own cure reads like."""
    times: int
    line: int
    put_lines: tuple[int, int]
    """First and last line of the `+` lines in the seam file."""


@dataclass(frozen=True)
class Alternative:
    """A scope and its seams; all of them must fit."""

    scope: str
    seams: tuple[Seam, ...]
    line: int


@dataclass(frozen=True)
class Hunk:
    """Alternatives of which exactly one must fit."""

    alternatives: tuple[Alternative, ...]
    optional: bool

    @property
    def is_import(self) -> bool:
        """Whether it only provides names for the other hunks of its file."""
        return self.alternatives[0].scope == IMPORT_SCOPE

    @property
    def replaces_only(self) -> bool:
        """Whether every seam of it rewrites something."""
        return all(
            s.op is Op.REPLACE for alternative in self.alternatives for s in alternative.seams
        )


class Forbidden(NamedTuple):
    """A post-condition: nothing in the file may read this after the patch."""

    pattern: Pattern
    line: int


@dataclass(frozen=True)
class FilePatch:
    """The hunks of one upstream file, under the names it had in the releases."""

    paths: tuple[str, ...]
    hunks: tuple[Hunk, ...]
    forbidden: tuple[Forbidden, ...]
    line: int
    releases: ReleaseRange
    """Outside of it the file is left alone."""


class Trailer(NamedTuple):
    """A `Key: value` line at the end of the message."""

    key: str
    value: str
    line: int


@dataclass(frozen=True)
class ReleaseRange:
    """The releases a patch is for, both ends included; None leaves an end open."""

    first: Version | None = None
    last: Version | None = None

    def __contains__(self, release: Version) -> bool:
        low = self.first is None or release >= self.first
        return low and (self.last is None or release <= self.last)


@dataclass(frozen=True)
class Patch:
    """One seam file: one patch, one commit."""

    name: str
    message: str
    trailers: tuple[Trailer, ...]
    releases: ReleaseRange
    needs: tuple[str, ...]
    adds: tuple[str, ...]
    files: tuple[FilePatch, ...]

    @property
    def subject(self) -> str:
        """First line of the message."""
        return self.message.partition("\n")[0]

    @property
    def seams(self) -> Iterator[Seam]:
        """All seams, alternatives included."""
        for file in self.files:
            for hunk in file.hunks:
                for alternative in hunk.alternatives:
                    yield from alternative.seams

    def trailer(self, key: str) -> list[str]:
        """Values of a trailer, in order."""
        return [trailer.value for trailer in self.trailers if trailer.key == key]


def parse(name: str, text: str) -> Patch:
    """Read a seam file; raise `SeamError` naming file, line and reason when it is malformed."""
    return _Parser(name, text).parse()


class _Line(NamedTuple):
    number: int
    kind: str
    text: str


@dataclass
class _OpenHunk:
    optional: bool
    line: int
    alternatives: list[_OpenAlternative] = field(default_factory=list)


@dataclass
class _OpenAlternative:
    scope: str
    times: int
    line: int
    groups: list[list[_Line]] = field(default_factory=lambda: [[]])


@dataclass
class _OpenFile:
    paths: tuple[str, ...]
    line: int
    releases: ReleaseRange
    hunks: list[_OpenHunk] = field(default_factory=list)
    forbidden: list[Forbidden] = field(default_factory=list)


class _Parser:
    """One pass over the lines; patterns are compiled as they are met, so errors have a line."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.lines = text.replace("\r\n", "\n").split("\n")
        self.releases = ReleaseRange()
        self.needs: list[str] = []
        self.adds: list[str] = []
        self.files: list[_OpenFile] = []

    def parse(self) -> Patch:
        border = next((at for at, line in enumerate(self.lines) if line == "---"), None)
        if border is None:
            raise self.error(len(self.lines), "no '---' line after the message")
        for number, line in enumerate(self.lines[border + 1 :], border + 2):
            self.read(number, line.rstrip())
        files = tuple(self.close_file(file) for file in self.files)
        if not files and not self.adds:
            raise self.error(len(self.lines), "the patch neither adds nor changes a file")
        return Patch(
            self.name,
            "\n".join(self.lines[:border]).strip() + "\n",
            tuple(self.trailers(border)),
            self.releases,
            tuple(self.needs),
            tuple(self.adds),
            files,
        )

    def error(self, number: int, reason: str) -> SeamError:
        return SeamError(f"{self.name}.seam:{number}: {reason}")

    def trailers(self, border: int) -> Iterator[Trailer]:
        """The last paragraph of the message; an indented line continues the one above."""
        end = border
        while end > 0 and not self.lines[end - 1].strip():
            end -= 1
        start = end
        while start > 0 and self.lines[start - 1].strip():
            start -= 1
        if end == 0 or start == 0:
            raise self.error(1, "want a subject, an empty line, why, an empty line and trailers")
        open_trailer: Trailer | None = None
        for number, line in enumerate(self.lines[start:end], start + 1):
            if line[0].isspace() and open_trailer:
                open_trailer = open_trailer._replace(value=f"{open_trailer.value} {line.strip()}")
                continue
            if open_trailer:
                yield open_trailer
            match = TRAILER.fullmatch(line.rstrip())
            if not match:
                raise self.error(number, f"want a trailer 'Key: value', not {line!r}")
            open_trailer = Trailer(match["key"], match["value"], number)
        if open_trailer:
            yield open_trailer

    # lines under the border ----------------------------------------------------------------

    def read(self, number: int, line: str) -> None:
        if not line:
            if self.files and self.files[-1].hunks:
                self.files[-1].hunks[-1].alternatives[-1].groups.append([])
        elif line.startswith("releases:"):
            self.releases = self.release_range(number, line.partition(":")[2].strip())
        elif line.startswith("needs:"):
            self.needs += self.names(number, line.partition(":")[2])
        elif line.startswith("adds "):
            self.adds.append(self.added(number, line[len("adds ") :].strip()))
        elif line.startswith("+++ "):
            self.files.append(self.new_file(number, line[len("+++ ") :]))
        elif line.startswith("@@"):
            self.open_hunk(number, line)
        elif line[0] == "!":
            forbidden = Forbidden(self.pattern(number, self.content(number, line)), number)
            self.open_file(number).forbidden.append(forbidden)
        elif line[0] in "-+= ":
            self.body(number, line)
        elif line[0] != "#":
            raise self.error(number, f"no line of a seam file starts like this: {line!r}")

    def release_range(self, number: int, text: str) -> ReleaseRange:
        match = RANGE.fullmatch(text)
        try:
            if match and (match["first"] or match["last"]):
                first, last = (Version(end) if end else None for end in match.groups())
                return ReleaseRange(first, last)
        except InvalidVersion as error:
            raise self.error(number, f"releases: {error}") from error
        raise self.error(
            number, f"want 'releases: FIRST .. LAST', one end may be left out: {text!r}"
        )

    def names(self, number: int, text: str) -> list[str]:
        names = text.replace(",", " ").split()
        if not names or not all(NAME.fullmatch(name) for name in names):
            raise self.error(number, f"want 'needs: NAME', names of patches: {text.strip()!r}")
        return names

    def added(self, number: int, path: str) -> str:
        if not path.startswith(ADDABLE) or ".." in PurePosixPath(path).parts:
            raise self.error(number, f"adds {path}: want a path under {' or '.join(ADDABLE)}")
        if path in self.adds:
            raise self.error(number, f"adds {path}: it is added above already")
        return path

    def new_file(self, number: int, text: str) -> _OpenFile:
        paths, ranged, releases = text.partition(" releases ")
        within = self.release_range(number, releases.strip()) if ranged else ReleaseRange()
        return _OpenFile(self.paths(number, paths), number, within)

    def paths(self, number: int, text: str) -> tuple[str, ...]:
        paths = tuple(path.strip() for path in text.split("|"))
        for path in paths:
            parts = PurePosixPath(path).parts
            if not path.endswith(".py") or path.startswith("/") or ".." in parts:
                raise self.error(
                    number, f"want a Python file, relative to python/sglang/srt: {path!r}"
                )
        return paths

    def open_file(self, number: int) -> _OpenFile:
        if not self.files:
            raise self.error(number, "a line outside any '+++ FILE'")
        return self.files[-1]

    def open_hunk(self, number: int, line: str) -> None:
        file = self.open_file(number)
        match = HUNK.fullmatch(line)
        if not match:
            raise self.error(
                number, f"want '@@ Class.method', '@@ or …', '@@? …' or '@@ import': {line!r}"
            )
        if match["other"]:
            if not file.hunks or match["optional"]:
                raise self.error(number, "'@@ or' gives an alternative to the '@@' hunk above it")
        else:
            file.hunks.append(_OpenHunk(bool(match["optional"]), number))
        times = int(match["times"] or 1)
        file.hunks[-1].alternatives.append(_OpenAlternative(match["scope"], times, number))

    def content(self, number: int, line: str) -> str:
        if len(line) > 1 and line[1] != " ":
            raise self.error(number, f"want one space after {line[0]!r}: {line!r}")
        return line[2:]

    def body(self, number: int, line: str) -> None:
        file = self.open_file(number)
        if not file.hunks:
            raise self.error(number, "a line outside any '@@'")
        group = file.hunks[-1].alternatives[-1].groups[-1]
        group.append(_Line(number, line[0], self.content(number, line)))

    def pattern(self, number: int, text: str) -> Pattern:
        if len(text.strip()) > ANCHOR_LIMIT:
            raise self.error(number, f"an anchor has at most {ANCHOR_LIMIT} characters")
        try:
            return compile_pattern(text)
        except Misfit as error:
            raise self.error(number, str(error)) from error

    # hunks ---------------------------------------------------------------------------------

    def close_file(self, file: _OpenFile) -> FilePatch:
        if not file.hunks:
            raise self.error(file.line, "no '@@' hunk for this file")
        for hunk in file.hunks:
            if hunk.optional and not file.forbidden:
                raise self.error(
                    hunk.line,
                    "'@@?' needs a '! pattern' line in its file, or a miss is silent; or give the "
                    "hunk a patch of its own with 'releases:'",
                )
        hunks = tuple(self.close_hunk(hunk) for hunk in file.hunks)
        return FilePatch(file.paths, hunks, tuple(file.forbidden), file.line, file.releases)

    def close_hunk(self, hunk: _OpenHunk) -> Hunk:
        closed = tuple(self.close_alternative(alternative) for alternative in hunk.alternatives)
        return Hunk(closed, hunk.optional)

    def close_alternative(self, alternative: _OpenAlternative) -> Alternative:
        seams: list[Seam] = []
        for group in alternative.groups:
            if group:
                seams += _Group(self, alternative, group).seams()
        if not seams:
            raise self.error(alternative.line, "no '+' line under this '@@'")
        plus = sum(seam.put_lines[1] - seam.put_lines[0] + 1 for seam in seams)
        if plus > PLUS_LIMIT:
            raise self.error(
                alternative.line, f"{plus} '+' lines, at most {PLUS_LIMIT}; move them into a module"
            )
        return Alternative(alternative.scope, tuple(seams), alternative.line)


class _Group:
    """Lines of a hunk with no empty line between: one insertion, or replacements under heads."""

    def __init__(self, parser: _Parser, owner: _OpenAlternative, lines: list[_Line]) -> None:
        self.parser = parser
        self.owner = owner
        self.lines = [line for line in lines if line.kind != "="]
        self.cures = tuple(
            parser.pattern(line.number, line.text) for line in lines if line.kind == "="
        )
        self.first = lines[0].number

    def seams(self) -> list[Seam]:
        changes = [at for at, line in enumerate(self.lines) if line.kind in "-+"]
        if not changes:
            raise self.parser.error(self.first, "these lines change nothing: no '+' among them")
        above = self.lines[: changes[0]]
        below = self.lines[changes[-1] + 1 :]
        inner = self.lines[changes[0] : changes[-1] + 1]
        stray = next((line for line in inner if line.kind == " "), None)
        if stray:
            raise self.parser.error(
                stray.number, "one insertion a group; leave an empty line between two"
            )
        if self.owner.scope == IMPORT_SCOPE:
            return [self.imports(above, inner, below)]
        if inner[0].kind == "-":
            return self.replacements(above, inner, below)
        return [self.insertion(above, inner, below)]

    def imports(self, above: list[_Line], inner: list[_Line], below: list[_Line]) -> Seam:
        if above or below or self.cures or any(line.kind != "+" for line in inner):
            raise self.parser.error(self.first, "'@@ import' takes '+' lines only")
        seam = self.seam(Op.IMPORT, None, inner, ())
        if not all(type(node).__name__ in ("Import", "ImportFrom") for node in seam.put.body):
            raise self.parser.error(inner[0].number, "'@@ import' takes import statements only")
        return seam

    def insertion(self, above: list[_Line], inner: list[_Line], below: list[_Line]) -> Seam:
        if any(line.kind == "-" for line in inner):
            raise self.parser.error(inner[0].number, "a '-' line stands above its '+' lines")
        if len(below) > 1:
            raise self.parser.error(
                below[1].number, "one context line below '+' lines names the place"
            )
        if below:
            return self.seam(Op.BEFORE, below[0], inner, self.heads(above))
        if above:
            return self.seam(Op.AFTER, above[-1], inner, self.heads(above[:-1]))
        decorates = inner[0].text.startswith("@") and not any(
            line.text.startswith(("def ", "class ", "async def ")) for line in inner
        )
        return self.seam(Op.DECORATE if decorates else Op.TOP, None, inner, ())

    def replacements(
        self, above: list[_Line], inner: list[_Line], below: list[_Line]
    ) -> list[Seam]:
        if below:
            raise self.parser.error(
                below[0].number, "a context line below a replacement says nothing; leave it out"
            )
        heads, seams, at = self.heads(above), [], 0
        while at < len(inner):
            anchor, at = inner[at], at + 1
            start = at
            while at < len(inner) and inner[at].kind == "+":
                at += 1
            if at == start:
                raise self.parser.error(
                    anchor.number, "want '+' lines under a '-' line (`pass` drops a statement)"
                )
            seams.append(self.seam(Op.REPLACE, anchor, inner[start:at], heads))
        return seams

    def heads(self, lines: list[_Line]) -> tuple[Pattern, ...]:
        heads = []
        for line in lines:
            head = self.parser.pattern(line.number, line.text)
            if not head.is_head:
                raise self.parser.error(
                    line.number, "a context line here must be the head of a statement, 'if …:'"
                )
            heads.append(head)
        return tuple(heads)

    def seam(
        self, op: Op, anchor: _Line | None, plus: list[_Line], heads: tuple[Pattern, ...]
    ) -> Seam:
        pattern = self.parser.pattern(anchor.number, anchor.text) if anchor else None
        put = self.replacement(op, pattern, plus)
        bound = frozenset().union(*(one.names for one in (*heads, *([pattern] if pattern else []))))
        loose = sorted(hole_names(put.text) - bound)
        if loose:
            raise self.parser.error(
                plus[0].number, f"${loose[0]} is not bound by the anchor or a head above it"
            )
        return Seam(
            op,
            self.owner.scope,
            put,
            pattern,
            heads,
            self.cures,
            self.owner.times,
            anchor.number if anchor else plus[0].number,
            (plus[0].number, plus[-1].number),
        )

    def replacement(self, op: Op, anchor: Pattern | None, plus: list[_Line]) -> Replacement:
        text = "\n".join(line.text for line in plus)
        number = plus[0].number
        rewrites_head = op is Op.REPLACE and anchor is not None and anchor.is_head
        if rewrites_head and (len(plus) != 1 or not text.endswith(":")):
            raise self.parser.error(number, "a head is replaced by one head, 'if …:'")
        if re.search(r"\$\*?_\b", text):
            raise self.parser.error(number, "an unnamed hole ($_) cannot be filled; name it")
        try:
            return compile_replacement(text, rewrites_head)
        except Misfit as error:
            raise self.parser.error(number, str(error)) from error
