# SPDX-License-Identifier: Apache-2.0
"""What holds for any file: a second run changes nothing, and other bytes never change."""

from __future__ import annotations

import ast
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from workshop import MESSAGE, PATH, assert_as_parsed, lay, on_shop, undone

from seam.errors import Misfit, SeamError
from seam.filelayer import resolve_file
from seam.resolve import Standing
from seam.seamfile import parse
from seam.source import BOM, Source, walk

HUNKS = [
    "@@ import\n+ import ours\n\n@@ f\n+ ours.top()",
    "@@ f\n+ top()\n+ if top:\n+     again()",
    "@@ f\n+ @ours",
    "@@ f\n+ above()\n  a($*_)",
    "@@ f\n  a($x, $*r)\n+ if below:\n+     below($x, $*r)",
    "@@ f\n- a($x, $*r)\n+ b($x, 1, $*r)",
    "@@ f\n- a($*r)\n+ with c:\n+     a($*r)",
    "@@ f\n- row[:$n]\n+ row[k : k + $n]",
    "@@ f\n- if $t or $u:\n+ if ours and ($t or $u):",
    "@@ C.g\n- self.x = $v\n+ self.x = ours($v)",
]
ARGUMENTS = ["x", "x + y", 'é, k="ü"', "x,\n        y,", '"""one\ntwo"""', "not x", "i for i in z"]
FILLERS = [
    "",
    "# füller",
    "pass",
    "z = 'a'; y = 2",
    "if z: pass",
    "z = (1,\n        2)",
    "'''é\n'''",
]

EXAMPLES = settings(max_examples=80, deadline=None)

blocks = st.lists(st.sampled_from(FILLERS), max_size=3)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A Python file that every hunk fits, in any layout: tabs, line ends, mark, last newline."""

    def block(depth: int) -> list[str]:
        return ["    " * depth + line for line in draw(blocks)]

    argument = draw(st.sampled_from(ARGUMENTS))
    lines = [
        *block(0),
        "import os  # ö",
        *block(0),
        *draw(st.sampled_from([[], ["@old"], ["@old(", "    1)"]])),
        "def f(x, y):",
        *draw(st.sampled_from([[], ['    """Döc."""'], ["    # remark"]])),
        *block(1),
        "    # about a",
        f"    a({argument})" + draw(st.sampled_from(["", "  # why"])),
        *block(1),
        "    w = row[" + draw(st.sampled_from([":n", "\n        :n  # all\n    ", ":n + 1"])) + "]",
        "    if x or \\",
        "            y:",
        "        pass",
        *block(1),
        "",
        "class C:",
        "    def g(self):",
        *block(2),
        "        self.x = " + draw(st.sampled_from(["1", "(1 +\n            2)", "y or z"])),
    ]
    text = "\n".join(lines)
    if draw(st.booleans()):
        text = "\n".join("\t" * (gap // 4) + line.lstrip(" ") for line in text.split("\n")
                         for gap in [len(line) - len(line.lstrip(" "))])  # fmt: skip
    if draw(st.booleans()):
        text += "\n"
    if draw(st.booleans()):
        text = text.replace("\n", "\r\n")
    return (BOM if draw(st.booleans()) else b"") + text.encode()


@EXAMPLES
@given(files(), st.sampled_from(HUNKS))
def test_second_run_changes_nothing(content: bytes, hunk: str) -> None:
    once = lay(content, hunk)
    assert once.edits
    again = lay(once.after.content, hunk)
    assert not again.edits
    assert {one.standing for one in again.hunks} == {Standing.PRESENT}


@EXAMPLES
@given(files(), st.sampled_from(HUNKS))
def test_taking_the_edits_out_gives_the_same_bytes(content: bytes, hunk: str) -> None:
    assert undone(lay(content, hunk)) == content


@EXAMPLES
@given(files(), st.permutations(HUNKS))
def test_tree_that_is_taken_over_is_the_one_that_would_be_parsed(
    content: bytes, order: list[str]
) -> None:
    pristine = current = Source(content, PATH)
    for hunk in [one for one in order if "a($" not in one][:4]:
        (file,) = on_shop(hunk).files
        current = resolve_file(file, current, pristine).after
        assert_as_parsed(current)


@EXAMPLES
@given(files(), st.permutations(HUNKS))
def test_patches_of_one_file_leave_each_other_alone(content: bytes, order: list[str]) -> None:
    pristine = current = Source(content, PATH)
    laid = []
    for hunk in [one for one in order if "a($" not in one][:4]:
        (file,) = on_shop(hunk).files
        laid.append(resolve_file(file, current, pristine))
        current = laid[-1].after
    for result in reversed(laid):
        content = undone(result)
    assert content == pristine.content
    ast.parse(current.raw)


@EXAMPLES
@given(files(), st.sampled_from(HUNKS))
def test_line_ends_mark_and_last_newline_stay(content: bytes, hunk: str) -> None:
    after = lay(content, hunk).after.content
    assert after.startswith(BOM) == content.startswith(BOM)
    assert after.count(b"\n") - after.count(b"\r\n") == (
        0 if b"\r\n" in content else after.count(b"\n")
    )
    assert after.endswith(b"\n") == content.endswith(b"\n")


@EXAMPLES
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_a_source_or_a_misfit(content: bytes) -> None:
    try:
        source = Source(content, PATH)
        tree = source.tree
    except Misfit:
        return
    assert source.bom + source.raw == content
    for node in walk(tree):
        if hasattr(node, "lineno"):
            span = source.span(node)
            assert 0 <= span.start <= span.end <= len(source.raw)


LINES = [
    "adds python/sglang/srt/a.py",
    "releases: 0.5.9 ..",
    "needs: other",
    "+++ a.py | b.py",
    "+++ a.py releases .. 0.5.9",
    "@@ import",
    "@@ C.f x2",
    "@@ or f",
    "@@? g",
    "+ import os",
    "+ @d",
    "+ a($x)",
    "+ if y:",
    "- a($*x)",
    "- if $x:",
    "  for $x in y:",
    "  a($x)",
    "= a($_)",
    "! a($*_)",
    "",
    "---",
    "# remark",
]


@EXAMPLES
@given(st.lists(st.sampled_from(LINES) | st.text(max_size=12), max_size=12))
def test_any_lines_are_a_patch_or_an_error_with_its_line(lines: list[str]) -> None:
    try:
        parse("a", MESSAGE + "\n".join(lines))
    except SeamError as error:
        assert re.match(r"a\.seam:\d+: .", str(error))
