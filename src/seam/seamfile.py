# SPDX-License-Identifier: Apache-2.0
"""The seam file: a commit message, `---`, then what the patch adds and where it hooks in."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
UNNAMED = re.compile(r"\$\*?_\b")
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
    return _Parser(name).patch(text)


class _Line(NamedTuple):
    number: int
    text: str

    @property
    def kind(self) -> str:
        return self.text[:1]

    @property
    def content(self) -> str:
        """What follows the mark of the line and one space."""
        return self.text[2:]


def _sections(
    lines: list[_Line], starts: Callable[[_Line], bool]
) -> tuple[list[_Line], list[list[_Line]]]:
    """What comes before the first line that starts a section, and the sections."""
    at = [index for index, line in enumerate(lines) if starts(line)] + [len(lines)]
    return lines[: at[0]], [lines[a:b] for a, b in itertools.pairwise(at)]


class _Parser:
    """Sections within sections; patterns are compiled as they are met, so errors have a line."""

    def __init__(self, name: str) -> None:
        self.name = name

    def error(self, number: int, reason: str) -> SeamError:
        return SeamError(f"{self.name}.seam:{number}: {reason}")

    def patch(self, text: str) -> Patch:
        written = text.replace("\r\n", "\n").split("\n")
        lines = [_Line(number, line.rstrip()) for number, line in enumerate(written, 1)]
        border = next((at for at, line in enumerate(lines) if line.text == "---"), None)
        if border is None:
            raise self.error(len(lines), "no '---' line after the message")
        body = [line for line in lines[border + 1 :] if line.kind != "#"]
        head, files = _sections(body, lambda line: line.text.startswith("+++ "))
        releases, needs, adds = self.head(head)
        if not files and not adds:
            raise self.error(len(lines), "the patch neither adds nor changes a file")
        return Patch(
            self.name,
            "\n".join(line.text for line in lines[:border]).strip() + "\n",
            self.trailers(lines[:border]),
            releases,
            needs,
            adds,
            tuple(self.file(lines) for lines in files),
        )

    def trailers(self, message: list[_Line]) -> tuple[Trailer, ...]:
        """The last paragraph of the message; an indented line continues the one above."""
        lines = message[:]
        while lines and not lines[-1].text:
            lines.pop()
        start = max((at for at, line in enumerate(lines) if not line.text), default=-1) + 1
        if start == 0:
            raise self.error(1, "want a subject, an empty line, why, an empty line and trailers")
        trailers: list[Trailer] = []
        for number, line in lines[start:]:
            match = TRAILER.fullmatch(line)
            if match:
                trailers.append(Trailer(match["key"], match["value"], number))
            elif line[0].isspace() and trailers:
                last = trailers[-1]
                trailers[-1] = last._replace(value=f"{last.value} {line.strip()}")
            else:
                raise self.error(number, f"want a trailer 'Key: value', not {line!r}")
        return tuple(trailers)

    # what the patch is for, needs and adds ---------------------------------------------------

    def head(self, lines: list[_Line]) -> tuple[ReleaseRange, tuple[str, ...], tuple[str, ...]]:
        releases, needs, adds = ReleaseRange(), list[str](), list[str]()
        for number, line in lines:
            key, _, value = line.partition(" ")
            if key == "releases:":
                releases = self.release_range(number, value.strip())
            elif key == "needs:":
                needs += self.names(number, value)
            elif key == "adds":
                adds.append(self.added(number, value.strip(), adds))
            elif line:
                raise self.error(
                    number, f"want 'releases:', 'needs:', 'adds PATH' or '+++ FILE', not {line!r}"
                )
        return releases, tuple(needs), tuple(adds)

    def release_range(self, number: int, text: str) -> ReleaseRange:
        match = RANGE.fullmatch(text)
        try:
            if match and (match["first"] or match["last"]):
                first, last = (Version(end) if end else None for end in match.groups())
                return ReleaseRange(first, last)
        except InvalidVersion as error:
            raise self.error(number, f"releases: {error}") from error
        raise self.error(
            number, f"want 'releases: FIRST .. LAST', an end may be left out: {text!r}"
        )

    def names(self, number: int, text: str) -> list[str]:
        names = text.replace(",", " ").split()
        if not names or not all(NAME.fullmatch(name) for name in names):
            raise self.error(number, f"want 'needs: NAME', names of patches: {text.strip()!r}")
        return names

    def added(self, number: int, path: str, adds: list[str]) -> str:
        if not path.startswith(ADDABLE) or ".." in PurePosixPath(path).parts:
            raise self.error(number, f"adds {path}: want a path under {' or '.join(ADDABLE)}")
        if path in adds:
            raise self.error(number, f"adds {path}: it is added above already")
        return path

    # files and hunks -----------------------------------------------------------------------

    def file(self, lines: list[_Line]) -> FilePatch:
        number, head = lines[0]
        names, ranged, releases = head.removeprefix("+++ ").partition(" releases ")
        forbidden = tuple(
            Forbidden(self.pattern(line), line.number) for line in lines if line.kind == "!"
        )
        rest = [line for line in lines[1:] if line.kind != "!"]
        stray, sections = _sections(rest, lambda line: line.text.startswith("@@"))
        for line in stray:
            if line.text:
                raise self.error(line.number, f"a line outside any '@@': {line.text!r}")
        if not sections:
            raise self.error(number, "no '@@' hunk for this file")
        return FilePatch(
            self.paths(number, names),
            tuple(self.hunks(sections, bool(forbidden))),
            forbidden,
            number,
            self.release_range(number, releases.strip()) if ranged else ReleaseRange(),
        )

    def paths(self, number: int, text: str) -> tuple[str, ...]:
        paths = tuple(path.strip() for path in text.split("|"))
        for path in paths:
            parts = PurePosixPath(path).parts
            if not path.endswith(".py") or path.startswith("/") or ".." in parts:
                raise self.error(
                    number, f"want a Python file, relative to python/sglang/srt: {path!r}"
                )
        return paths

    def hunks(self, sections: list[list[_Line]], guarded: bool) -> list[Hunk]:
        hunks: list[Hunk] = []
        for lines in sections:
            number, head = lines[0]
            match = HUNK.fullmatch(head)
            if not match:
                raise self.error(
                    number, f"want '@@ Class.method', '@@ or …', '@@? …' or '@@ import': {head!r}"
                )
            alternative = self.alternative(match["scope"], int(match["times"] or 1), lines)
            if match["optional"] and not guarded:
                raise self.error(
                    number,
                    "'@@?' needs a '! pattern' line in its file, or a miss is silent; or say for "
                    "which releases it is: '+++ FILE releases FIRST .. LAST'",
                )
            if not match["other"]:
                hunks.append(Hunk((alternative,), bool(match["optional"])))
            elif hunks and not match["optional"]:
                hunks[-1] = Hunk((*hunks[-1].alternatives, alternative), hunks[-1].optional)
            else:
                raise self.error(number, "'@@ or' gives an alternative to the '@@' hunk above it")
        return hunks

    def alternative(self, scope: str, times: int, lines: list[_Line]) -> Alternative:
        number, rest = lines[0].number, lines[1:]
        for line in rest:
            if line.text and line.kind not in "-+= ":
                raise self.error(line.number, f"no line of a hunk starts like this: {line.text!r}")
            if len(line.text) > 1 and line.text[1] != " ":
                raise self.error(line.number, f"want one space after {line.kind!r}: {line.text!r}")
        groups = (list(group) for text, group in itertools.groupby(rest, _has_text) if text)
        seams = [seam for group in groups for seam in _Group(self, scope, times, group).seams()]
        if not seams:
            raise self.error(number, "no '+' line under this '@@'")
        plus = sum(line.kind == "+" for line in rest)
        if plus > PLUS_LIMIT:
            raise self.error(
                number, f"{plus} '+' lines, at most {PLUS_LIMIT}; move them into a module"
            )
        return Alternative(scope, tuple(seams), number)

    def pattern(self, line: _Line) -> Pattern:
        if len(line.content.strip()) > ANCHOR_LIMIT:
            raise self.error(line.number, f"an anchor has at most {ANCHOR_LIMIT} characters")
        try:
            return compile_pattern(line.content)
        except Misfit as error:
            raise self.error(line.number, str(error)) from error


def _has_text(line: _Line) -> bool:
    return bool(line.text)


class _Group:
    """Lines of a hunk with no empty line between: one insertion, or replacements under heads."""

    def __init__(self, parser: _Parser, scope: str, times: int, lines: list[_Line]) -> None:
        self.parser = parser
        self.scope = scope
        self.times = times
        self.cures = tuple(parser.pattern(line) for line in lines if line.kind == "=")
        self.lines = [line for line in lines if line.kind != "="]
        self.first = lines[0].number

    def seams(self) -> list[Seam]:
        changes = [at for at, line in enumerate(self.lines) if line.kind in "-+"]
        if not changes:
            raise self.parser.error(self.first, "these lines change nothing: no '+' among them")
        above = self.lines[: changes[0]]
        inner = self.lines[changes[0] : changes[-1] + 1]
        below = self.lines[changes[-1] + 1 :]
        for line in inner:
            if line.kind == " ":
                reason = "one insertion a group; leave an empty line between two"
                raise self.parser.error(line.number, reason)
        if self.scope == IMPORT_SCOPE:
            return [self.imports(above, inner, below)]
        if inner[0].kind == "-":
            return self.replacements(above, inner, below)
        return [self.insertion(above, inner, below)]

    def imports(self, above: list[_Line], inner: list[_Line], below: list[_Line]) -> Seam:
        if above or below or self.cures or any(line.kind != "+" for line in inner):
            raise self.parser.error(self.first, "'@@ import' takes '+' lines only")
        seam = self.seam(Op.IMPORT, None, inner)
        if not all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in seam.put.body):
            raise self.parser.error(inner[0].number, "'@@ import' takes import statements only")
        return seam

    def insertion(self, above: list[_Line], inner: list[_Line], below: list[_Line]) -> Seam:
        if any(line.kind == "-" for line in inner):
            raise self.parser.error(inner[0].number, "a '-' line stands above its '+' lines")
        if len(below) > 1:
            reason = "one context line below '+' lines names the place"
            raise self.parser.error(below[1].number, reason)
        if below:
            return self.seam(Op.BEFORE, below[0], inner, self.heads(above))
        if above:
            return self.seam(Op.AFTER, above[-1], inner, self.heads(above[:-1]))
        decorates = all(line.content.startswith("@") for line in inner)
        return self.seam(Op.DECORATE if decorates else Op.TOP, None, inner)

    def replacements(
        self, above: list[_Line], inner: list[_Line], below: list[_Line]
    ) -> list[Seam]:
        if below:
            reason = "a context line below a replacement says nothing; leave it out"
            raise self.parser.error(below[0].number, reason)
        heads = self.heads(above)
        _, pairs = _sections(inner, lambda line: line.kind == "-")
        for anchor, *plus in pairs:
            if not plus:
                reason = "want '+' lines under a '-' line (`pass` drops a statement)"
                raise self.parser.error(anchor.number, reason)
        return [self.seam(Op.REPLACE, anchor, plus, heads) for anchor, *plus in pairs]

    def heads(self, lines: list[_Line]) -> tuple[Pattern, ...]:
        heads = tuple(self.parser.pattern(line) for line in lines)
        for line, head in zip(lines, heads, strict=True):
            if not head.is_head:
                reason = "a context line here must be the head of a statement, 'if …:'"
                raise self.parser.error(line.number, reason)
        return heads

    def seam(
        self, op: Op, anchor: _Line | None, plus: list[_Line], heads: tuple[Pattern, ...] = ()
    ) -> Seam:
        if self.times > 1 and not anchor:
            raise self.parser.error(plus[0].number, "xN counts anchors, and there is none here")
        pattern = self.parser.pattern(anchor) if anchor else None
        put = self.replacement(op, pattern, plus)
        bound = {name for one in (*heads, pattern) if one for name in one.names}
        loose = sorted(hole_names(put.text) - bound)
        if loose:
            reason = f"${loose[0]} is not bound by the anchor or a head above it"
            raise self.parser.error(plus[0].number, reason)
        return Seam(
            op,
            self.scope,
            put,
            pattern,
            heads,
            self.cures,
            self.times,
            anchor.number if anchor else plus[0].number,
            (plus[0].number, plus[-1].number),
        )

    def replacement(self, op: Op, anchor: Pattern | None, plus: list[_Line]) -> Replacement:
        text = "\n".join(line.content for line in plus)
        number = plus[0].number
        rewrites_head = op is Op.REPLACE and anchor is not None and anchor.is_head
        if rewrites_head and (len(plus) != 1 or not text.endswith(":")):
            raise self.parser.error(number, "a head is replaced by one head, 'if …:'")
        if UNNAMED.search(text):
            raise self.parser.error(number, "an unnamed hole ($_) cannot be filled; name it")
        try:
            return compile_replacement(text, rewrites_head, comments=op is not Op.REPLACE)
        except Misfit as error:
            raise self.parser.error(number, str(error)) from error
