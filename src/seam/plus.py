# SPDX-License-Identifier: Apache-2.0
"""The `+` lines that an edit of laid lines asks for: its changes made in them, holes restored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from difflib import SequenceMatcher

from seam.errors import Misfit
from seam.pattern import compile_replacement, hole_names
from seam.pieces import Piece
from seam.seamfile import Op, Seam

TOKEN = re.compile(
    r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|\#[^\n]*"
    r"|(?P<hole>\$\*?(?P<name>[A-Za-z_]\w*))|\w+|[^\S\n]+|\n|.",
    re.DOTALL,
)
CONSTANT = re.compile(r"[\d\"'.+-].*|True|False|None|self|cls", re.DOTALL)
"""What a hole may hold that also stands in code for other reasons."""


def plain(piece: Piece, content: bytes) -> str:
    """What stands in the place of a piece, laid out as `+` lines are."""
    skip = int(piece.edit.seam.op is Op.REPLACE)
    return _dedented(content, piece.indent, skip).strip("\n")


def _dedented(text: bytes, indent: bytes, skip: int) -> str:
    """Lines without `indent`, but for the first `skip`; tabs turn to the depth `+` lines have."""
    lines = text.decode().replace("\r\n", "\n").split("\n")
    cut = [
        line if at < skip else line.removeprefix(indent.decode()) if line.strip() else ""
        for at, line in enumerate(lines)
    ]
    tabs = [len(line) - len(line.lstrip("\t")) for line in cut]
    return "\n".join("    " * gap + line[gap:] for gap, line in zip(tabs, cut, strict=True))


def rewritten(seam: Seam, holes: dict[str, str], old: str, new: str) -> tuple[str, ...]:
    """Ways to write the `+` lines so that they give `new` where they gave `old`, best first.

    The edit is made in the `+` lines as they are, so that what was not edited keeps its holes,
    empty runs among them. Where the place is laid out in another way than its lines, the new text
    is taken whole and every hole is sought in it. Raises `Misfit` (bad-pattern) when no way is
    what `+` lines can be.
    """
    used = hole_names(seam.put.text)
    order = sorted(holes.items(), key=lambda item: item[0] in used)
    marks = {text: name for name, text in order if text and not CONSTANT.fullmatch(text)}
    named = {match["name"]: match["hole"] for match in _matches(seam) if match["hole"]}
    news = _elements(new, holes.values())

    def unfilled(elements: Iterable[str]) -> str:
        """Elements with holes for what the holes read; a run keeps its star."""
        return "".join(
            named.get(marks[one], f"${marks[one]}") if one in marks else one for one in elements
        )

    ways, misfits = [], []
    for text in dict.fromkeys((*_transferred(seam, holes, old, news, unfilled), unfilled(news))):
        try:
            compile_replacement(text, seam.put.is_head, comments=seam.op is not Op.REPLACE)
            ways.append(text)
        except Misfit as misfit:
            misfits.append(misfit)
    if not ways:
        raise misfits[-1]
    return tuple(ways)


def _matches(seam: Seam) -> Iterator[re.Match[str]]:
    patterns = (*seam.inside, *((seam.anchor,) if seam.anchor else ()), seam.put)
    return (match for one in patterns for match in TOKEN.finditer(one.text))


def _elements(text: str, runs: Iterable[str]) -> list[str]:
    """Tokens; those that together read like a run are one element."""
    tokens = [match[0] for match in TOKEN.finditer(text)]
    split = [[match[0] for match in TOKEN.finditer(run)] for run in runs]
    split = sorted((run for run in split if len(run) > 1), key=len, reverse=True)
    found, at = [], 0
    while at < len(tokens):
        size = next((len(run) for run in split if tokens[at : at + len(run)] == run), 1)
        found.append("".join(tokens[at : at + size]))
        at += size
    return found


def _transferred(
    seam: Seam,
    holes: dict[str, str],
    old: str,
    news: list[str],
    unfilled: Callable[[Iterable[str]], str],
) -> Iterator[str]:
    """The `+` lines with the changes from `old` to `news` made in them."""
    put = [match[0] for match in TOKEN.finditer(seam.put.text)]
    filled, owners = _filled(put, holes)
    olds = _elements(old, holes.values())
    origin: list[int | None] = [None] * len(olds)
    for block in SequenceMatcher(None, filled, olds, autojunk=False).get_matching_blocks():
        for step in range(block.size):
            origin[block.b + step] = owners[block.a + step]
    changes = []
    for tag, a, b, c, d in SequenceMatcher(None, olds, news, autojunk=False).get_opcodes():
        touched = [at for at in origin[a:b] if at is not None]
        left = origin[a - 1] if a else -1
        right = origin[b] if b < len(origin) else len(put)
        if tag == "equal":
            continue
        if touched:
            changes.append((min(touched), max(touched) + 1, unfilled(news[c:d])))
        elif left is not None:
            changes.append((left + 1, left + 1, unfilled(news[c:d])))
        elif right is not None:
            changes.append((right, right, unfilled(news[c:d])))
        else:
            return
    for start, end, text in reversed(changes):
        put[start:end] = [text]
    yield "".join(put)


def _filled(put: list[str], holes: dict[str, str]) -> tuple[list[str], list[int]]:
    """The tokens of `+` lines once their holes are filled, and which of them each came from."""
    filled: list[str] = []
    owners: list[int] = []
    for at, token in enumerate(put):
        match = TOKEN.fullmatch(token)
        text = holes.get(match["name"], "") if match and match["hole"] else token
        if text:
            filled.append(text)
            owners.append(at)
            continue
        # An empty run takes the comma before it along.
        while filled and (filled[-1].isspace() or filled[-1] == ","):
            filled.pop()
            owners.pop()
    return filled, owners
