# SPDX-License-Identifier: Apache-2.0
"""Any text is a patch, or one clear error that names its line."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st
from workshop import MESSAGE

from seam.errors import SeamError
from seam.seamfile import Patch, parse

FOLDER = Path(__file__).resolve().parents[2] / "series"
REAL = [path.read_text() for path in sorted(FOLDER.glob("*.seam"))]
EXAMPLES = settings(max_examples=300, deadline=None)
PIECES = [
    "$", "$*", "$_", "$*_", "@@", "@@?", "@@ or ", " x0", " x2", "+ ", "- ", "= ", "! ", "  ", "#",
    "---", "+++ ", "adds ", "needs:", "releases:", " .. ", "(", ")", "[", ":", "\\", "'''", '"',
    "\n", "\r\n", "\r", "\t", "\x00", "\x0c", "\u2028", "\ufeff", "é", "lambda", "await ", "if x:",
    "match x:", "_hole1_x", "_holeN_", "*" * 50, "(" * 300, "-" * 300, "not " * 40, "f'{x}'",
]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A seam file of the series with some of its lines and characters changed."""
    lines = draw(st.sampled_from(REAL)).split("\n")
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(lines) - 1))
        change = draw(st.sampled_from(["drop", "double", "move", "cut", "insert", "text"]))
        if change == "drop" and len(lines) > 1:
            del lines[at]
        elif change == "double":
            lines.insert(at, lines[at])
        elif change == "move":
            lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(at))
        elif change == "cut":
            lines = lines[: at + 1]
        else:
            piece = draw(st.sampled_from(PIECES) if change == "insert" else st.text(max_size=9))
            column = draw(st.integers(0, len(lines[at])))
            lines[at] = lines[at][:column] + piece + lines[at][column:]
    return "\n".join(lines)


def check(text: str) -> None:
    """Parse it: a patch, or an error with its place."""
    try:
        patch = parse("a", text)
    except SeamError as error:
        place = re.match(r"a\.seam:(\d+): .", str(error))
        assert place and 1 <= int(place[1]) <= text.count("\n") + text.count("\r") + 1, str(error)
    else:
        assert isinstance(patch, Patch) and (patch.files or patch.adds)
        assert all(seam.line for seam in patch.seams)


@EXAMPLES
@given(damaged())
def test_damaged_seam_file_is_a_patch_or_an_error_with_its_line(text: str) -> None:
    check(text)


@EXAMPLES
@given(st.text(alphabet=st.characters(), max_size=40), st.sampled_from("-+=! "))
@example("a\x00b", "-")
@example("(" * 1000, "-")
@example("-" * 5000 + "a", "+")
@example("a" + ".b" * 5000, "+")
def test_any_pattern_is_one_or_an_error_with_its_line(text: str, mark: str) -> None:
    check(f"{MESSAGE}+++ a.py\n@@ f\n- a($x)\n+ b($x)\n\n{mark} {text}\n")


@EXAMPLES
@given(st.text(max_size=60))
def test_any_text_is_a_patch_or_an_error_with_its_line(text: str) -> None:
    check(text)
