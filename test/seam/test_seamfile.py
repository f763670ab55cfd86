# SPDX-License-Identifier: Apache-2.0
"""A seam file says what it says, or one clear error with its line."""

from __future__ import annotations

import subprocess

import pytest
from workshop import MESSAGE, on_shop, patch

from seam.errors import SeamError
from seam.layer import Outcome, PatchResult
from seam.seamfile import Op, parse

BODY_LINE = MESSAGE.count("\n") + 1


@pytest.mark.parametrize(
    ("hunk", "op", "line"),
    [
        ("@@ import\n+ import os", Op.IMPORT, 3),
        ("@@ C.f\n+ top()", Op.TOP, 3),
        ("@@ C.f\n+ @decorate", Op.DECORATE, 3),
        ("@@ C.f\n+ first()\n  anchor()", Op.BEFORE, 4),
        ("@@ C.f\n  anchor()\n+ second()", Op.AFTER, 3),
        ("@@ C.f\n- old($x)\n+ new($x)", Op.REPLACE, 3),
        ("@@ C\n+ @property\n+ def f(self):\n+     return 1", Op.TOP, 3),
    ],
)
def test_place_of_the_plus_lines_says_what_is_done(hunk: str, op: Op, line: int) -> None:
    (seam,) = on_shop(hunk).seams
    assert seam.op is op
    assert seam.line == BODY_LINE + line - 1


def test_groups_alternatives_heads_and_cures_are_kept_with_their_lines() -> None:
    made = on_shop(
        """\
        @@ C.f x2
          for $i in xs:
          if $i:
        - old($i)
        + new($i)
        = upstream($_)

          anchor()
        + after()
        @@ or D.f
        - old($i)
        + new($i)
        @@? E.f
        - old($i)
        + new($i)
        ! old($*_)
        """
    )
    (file,) = made.files
    first, optional = file.hunks
    assert [alternative.scope for alternative in first.alternatives] == ["C.f", "D.f"]
    replace, after = first.alternatives[0].seams
    assert [head.text for head in replace.inside] == ["for $i in xs:", "if $i:"]
    assert [cure.text for cure in replace.cures] == ["upstream($_)"]
    assert not after.cures and after.times == 2
    assert replace.put_lines == (BODY_LINE + 5, BODY_LINE + 5)
    assert optional.optional and optional.replaces_only
    assert [one.line for one in file.forbidden] == [BODY_LINE + 16]


def test_head_of_the_patch_is_read() -> None:
    made = patch(
        """\
        releases: 0.5.9 .. 0.5.11
        needs: one, two
        adds python/sglang/srt/a.py
        # a remark
        +++ new/place.py | old/place.py releases .. 0.5.10
        @@ f
        + g()
        """
    )
    assert str(made.releases.first) == "0.5.9" and str(made.releases.last) == "0.5.11"
    assert made.needs == ("one", "two")
    assert made.adds == ("python/sglang/srt/a.py",)
    assert made.files[0].paths == ("new/place.py", "old/place.py")
    assert made.files[0].releases.first is None and str(made.files[0].releases.last) == "0.5.10"
    assert made.subject == "area: what it does"


def test_trailers_continue_on_indented_lines() -> None:
    made = parse(
        "a",
        "s: t\n\nwhy\n\nTested: here\n  and there\nRejected: a | b\n---\n"
        "adds python/sglang/srt/a.py\n",
    )
    assert made.trailer("Tested") == ["here and there"]
    assert made.trailer("Rejected") == ["a | b"]


def test_windows_line_ends_are_read_alike() -> None:
    text = MESSAGE + "+++ shop.py\n@@ f\n- a($x)\n+ b($x)\n"
    windows, unix = parse("a", text.replace("\n", "\r\n")), parse("a", text)
    assert windows.message == unix.message
    assert [seam.line for seam in windows.seams] == [seam.line for seam in unix.seams]


def test_commit_message_is_what_git_takes_for_trailers() -> None:
    message = PatchResult(patch("adds python/sglang/srt/a.py"), Outcome.APPLIED).commit_message
    run = subprocess.run(
        ["git", "interpret-trailers", "--parse"], input=message, capture_output=True, text=True
    )
    assert run.stdout.splitlines() == [*MESSAGE.splitlines()[4:-1], "Seam: a-patch"]


@pytest.mark.parametrize(
    ("body", "line", "reason"),
    [
        ("adds elsewhere/a.py", 1, "want a path under"),
        ("adds python/sglang/srt/../a.py", 1, "want a path under"),
        ("adds python/sglang/srt/a.py\nadds python/sglang/srt/a.py", 2, "added above already"),
        ("releases: 0.5.9", 1, "FIRST .. LAST"),
        ("releases: ..", 1, "FIRST .. LAST"),
        ("releases: new .. 0.5.9", 1, "Invalid version"),
        ("needs: Some Thing", 1, "names of patches"),
        ("wants: x", 1, "want 'releases:'"),
        ("@@ f\n+ g()", 1, "want 'releases:'"),
        ("+++ /etc/a.py\n@@ f\n+ g()", 1, "relative to"),
        ("+++ a.txt\n@@ f\n+ g()", 1, "want a Python file"),
        ("+++ a.py", 1, "no '@@' hunk"),
        ("+++ a.py\n+ g()", 2, "outside any '@@'"),
        ("+++ a.py\n@@ f g\n+ g()", 2, "want '@@ Class.method'"),
        ("+++ a.py\n@@ f x0\n+ g()", 2, "want '@@ Class.method'"),
        ("+++ a.py\n@@ or f\n+ g()", 2, "alternative"),
        ("+++ a.py\n@@? f\n- a()\n+ g()", 2, "needs a '! pattern' line"),
        ("+++ a.py\n@@ f", 2, "no '\\+' line"),
        ("+++ a.py\n@@ f\n  g()", 3, "change nothing"),
        ("+++ a.py\n@@ f\n+g()", 3, "one space after"),
        ("+++ a.py\n@@ f\n* g()", 3, "no line of a hunk"),
        ("+++ a.py\n@@ f\n- g()", 3, "want '\\+' lines under"),
        ("+++ a.py\n@@ f\n- g()\n- h()\n+ i()", 3, "want '\\+' lines under"),
        ("+++ a.py\n@@ f\n+ g()\n- h()", 3, "stands above"),
        ("+++ a.py\n@@ f\n+ g()\n  a()\n+ h()", 4, "one insertion a group"),
        ("+++ a.py\n@@ f\n+ g()\n  a()\n  b()", 5, "names the place"),
        ("+++ a.py\n@@ f\n  a()\n+ g()\n  b()", 3, "head of a statement"),
        ("+++ a.py\n@@ f\n  a()\n- g()\n+ h()", 3, "head of a statement"),
        ("+++ a.py\n@@ f\n- g()\n+ h()\n  a()", 5, "says nothing"),
        ("+++ a.py\n@@ f\n- g($x)\n+ h($y)", 4, "\\$y is not bound"),
        ("+++ a.py\n@@ f\n- g($_)\n+ h($_)", 4, "unnamed hole"),
        ("+++ a.py\n@@ f\n- g(\n+ h()", 3, "not Python"),
        ("+++ a.py\n@@ f\n- g()\n+ h(", 4, "not Python"),
        ("+++ a.py\n@@ f\n- g()\n+ h()  # why", 4, "comment"),
        ("+++ a.py\n@@ f\n- g($x)\n+ $x", 4, "reads like anything"),
        ("+++ a.py\n@@ f\n- $x\n+ g($x)", 3, "reads like anything"),
        ("+++ a.py\n@@ f\n- if a:\n+ b()", 4, "replaced by one head"),
        ("+++ a.py\n@@ f\n- g('" + "x" * 100 + "')\n+ h()", 3, "at most 100"),
        ("+++ a.py\n@@ f\n" + "+ g()\n" * 7, 2, "7 '\\+' lines, at most 6"),
        ("+++ a.py\n@@ f x2\n+ g()", 3, "xN counts anchors"),
        ("+++ a.py\n@@ import\n  a()\n+ import os", 3, "takes '\\+' lines only"),
        ("+++ a.py\n@@ import\n+ os = 1", 3, "import statements only"),
        ("+++ a.py\n@@ f\n+ g()\n! (", 4, "not Python"),
        ("", 1, "neither adds nor changes"),
    ],
)
def test_malformed_line_is_named_with_its_reason(body: str, line: int, reason: str) -> None:
    with pytest.raises(SeamError, match=f"^a.seam:{BODY_LINE + line - 1}: .*{reason}"):
        parse("a", MESSAGE + body)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("s: t\n\nwhy\n\nTested: x\n", 6, "no '---' line"),
        ("s: t\n---\nadds python/sglang/srt/a.py", 1, "want a subject"),
        ("s: t\n\nwhy it is\n---\nadds python/sglang/srt/a.py", 3, "want a trailer"),
    ],
)
def test_malformed_message_is_named_with_its_reason(text: str, line: int, reason: str) -> None:
    with pytest.raises(SeamError, match=f"^a.seam:{line}: .*{reason}"):
        parse("a", text)
