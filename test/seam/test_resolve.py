# SPDX-License-Identifier: Apache-2.0
"""Each line of the grammar, applied, present, upstream and not fitting."""

from __future__ import annotations

import textwrap

import pytest
from workshop import laid, lay, on_shop

from seam.errors import Kind, Misfit
from seam.filelayer import resolve_file
from seam.resolve import Standing
from seam.source import Source

CODE = """\
import os
from sys import path


class Shop:
    \"\"\"A shop.\"\"\"

    @classmethod
    def open(cls, door):
        \"\"\"Open it.\"\"\"
        door.unlock()

    def sell(self, item):
        # first of all
        till.open(item)
        if item.rare and \\
                not item.sold:
            self.total = self.total + item.price
        for each in self.shelf:
            each.move(
                1,  # up
                fast=True,
            )
        return till.close(item)


def close(): return os.name
"""


def changed(hunks: str, code: str = CODE) -> dict[str, str]:
    """Lines taken away and put there, each with its indent."""
    before, after = textwrap.dedent(code).splitlines(), laid(code, hunks).splitlines()
    gone = [line for line in before if before.count(line) > after.count(line)]
    new = [line for line in after if after.count(line) > before.count(line)]
    return {"gone": "\n".join(gone), "new": "\n".join(new)}


def misfit(hunks: str, code: str = CODE) -> Misfit:
    """The misfit that laying the hunks raises."""
    with pytest.raises(Misfit) as caught:
        lay(code, hunks)
    return caught.value


@pytest.mark.parametrize(
    ("hunks", "gone", "new"),
    [
        ("@@ import\n+ import json", "", "import json"),
        ("@@ Shop.open\n+ @log", "", "    @log"),
        ("@@ Shop\n+ size = 1", "", "    size = 1"),
        ("@@ Shop.open\n+ log()", "", "        log()"),
        ("@@ Shop.sell\n+ log()", "", "        log()"),
        ("@@ Shop.sell\n+ log()\n  till.open($_)", "", "        log()"),
        ("@@ Shop.sell\n  till.open($x)\n+ log($x)", "", "        log(item)"),
        ("@@ Shop.sell\n  each.move($*_)\n+ log()", "", "            log()"),
        ("@@ Shop.sell\n  for $x in self.shelf:\n+ log()", "", "        log()"),
        (
            "@@ Shop.sell\n  for $x in self.shelf:\n+ log($x)\n  each.move($*_)",
            "",
            "            log(each)",
        ),
        (
            "@@ Shop.sell\n+ if a:\n+     b()\n  till.open($_)",
            "",
            "        if a:\n            b()",
        ),
        (
            "@@ Shop.sell\n- till.close($x)\n+ sales.close($x, self)",
            "        return till.close(item)",
            "        return sales.close(item, self)",
        ),
        (
            "@@ Shop.sell\n  if $x.rare and $*_:\n- self.total + $y\n+ add(self.total, $y)",
            "            self.total = self.total + item.price",
            "            self.total = add(self.total, item.price)",
        ),
        (
            "@@ Shop.sell\n- if $x.rare and $y:\n+ if $x.odd and $y:",
            "        if item.rare and \\",
            "        if item.odd and \\",
        ),
        (
            "@@ Shop.sell\n- till.open($x)\n+ with guard:\n+     till.open($x)",
            "        till.open(item)",
            "        with guard:\n            till.open(item)",
        ),
        (
            "@@ close\n- os.name\n+ path[0]",
            "def close(): return os.name",
            "def close(): return path[0]",
        ),
    ],
)
def test_hunk_is_applied_where_it_says(hunks: str, gone: str, new: str) -> None:
    assert changed(hunks) == {"gone": gone, "new": new}


@pytest.mark.parametrize(
    "hunks",
    [
        "@@ import\n+ import json",
        "@@ Shop.open\n+ @log",
        "@@ Shop\n+ size = 1",
        "@@ Shop.open\n+ log()",
        "@@ Shop.sell\n+ log()\n+ more()\n  till.open($_)",
        "@@ Shop.sell\n  till.open($x)\n+ log($x)",
        "@@ Shop.sell\n- till.close($x)\n+ sales.close($x, self)",
        "@@ Shop.sell\n- self.total + $y\n+ add(self.total + $y)",
        "@@ Shop.sell x5\n- item\n+ item.kind",
        "@@ Shop.sell\n- if $x.rare and $y:\n+ if $x.odd and $y:",
    ],
)
def test_second_run_finds_everything_present(hunks: str) -> None:
    again = lay(laid(CODE, hunks), hunks)
    assert [result.standing for result in again.hunks] == [Standing.PRESENT]
    assert again.edits == ()


def test_insertion_above_climbs_over_the_comment_of_its_anchor() -> None:
    lines = laid(CODE, "@@ Shop.sell\n+ log()\n  till.open($_)").splitlines()
    at = lines.index("        log()")
    assert lines[at + 1].strip() == "# first of all"


def test_top_of_a_body_is_under_the_docstring_and_above_comments() -> None:
    lines = laid(CODE, "@@ Shop.open\n+ log()\n\n@@ Shop.sell\n+ log()").splitlines()
    first = lines.index("        log()")
    assert lines[first - 1].strip() == '"""Open it."""'
    assert lines[lines.index("        # first of all") - 1] == "        log()"


def test_top_of_a_body_that_is_only_a_docstring() -> None:
    code = 'def f():\n    """Nothing."""\n'
    assert laid(code, "@@ f\n+ g()") == code + "    g()\n"


def test_decorator_stands_outermost() -> None:
    lines = laid(CODE, "@@ Shop.open\n+ @log").splitlines()
    assert lines[lines.index("    @log") + 1] == "    @classmethod"


def test_import_goes_under_the_last_import_above_the_first_definition() -> None:
    code = "import a\n\nx = 1\nimport b\n\n\ndef f(): ...\n\n\nimport c\n"
    assert "import b\nimport ours\n" in laid(code, "@@ import\n+ import ours")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('"""Doc."""\n\nx = 1\n', '"""Doc."""\nimport ours\n\nx = 1\n'),
        ("# licence\n\nx = 1\n", "# licence\n\nimport ours\nx = 1\n"),
        ("# licence\n", "# licence\nimport ours\n"),
        ("@d\ndef f(): ...\n", "import ours\n@d\ndef f(): ...\n"),
        ("import a", "import a\nimport ours\n"),
    ],
)
def test_import_finds_a_place_in_a_file_without_one(code: str, expected: str) -> None:
    assert laid(code, "@@ import\n+ import ours") == expected


def test_import_is_left_out_when_no_other_hunk_of_the_file_is_applied() -> None:
    hunks = "@@ import\n+ import ours\n\n@@ f\n- a($x)\n+ ours.a($x)\n= upstream($_)\n"
    assert laid("def f():\n    upstream(1)\n", hunks) == "def f():\n    upstream(1)\n"


# what upstream has -----------------------------------------------------------------------------

CURE = "@@ f\n- row[:$n]\n+ row[p : p + $n]\n= row[$_:$_]\n"


@pytest.mark.parametrize(
    ("code", "standing"),
    [
        ("def f():\n    return row[:n]\n", Standing.APPLIED),
        ("def f():\n    return row[p : p + n]\n", Standing.PRESENT),
        ("def f():\n    return row[start:end]\n", Standing.UPSTREAM),
    ],
)
def test_cure_of_upstream_is_told_from_our_own(code: str, standing: Standing) -> None:
    result = lay(code, CURE)
    assert [one.standing for one in result.hunks] == [standing]


def test_cure_is_noted_with_its_place() -> None:
    (result,) = lay("def f():\n    return row[start:end]\n", CURE).hunks
    assert result.note == "shop.py:2 f reads 'row[$_:$_]'"


def test_cure_is_seen_for_an_insertion_although_its_anchor_is_there() -> None:
    hunks = "@@ f\n  a()\n+ ours()\n= theirs($*_)\n"
    (result,) = lay("def f():\n    a()\n    theirs(1)\n", hunks).hunks
    assert result.standing is Standing.UPSTREAM


def test_cure_is_seen_when_the_head_around_the_anchor_is_gone() -> None:
    hunks = "@@ f\n  for $i in xs:\n- old($i)\n+ ours($i)\n= theirs($_)\n"
    (result,) = lay("def f():\n    theirs(xs)\n", hunks).hunks
    assert result.standing is Standing.UPSTREAM


def test_both_anchor_and_cure_is_ambiguous() -> None:
    told = misfit(CURE, "def f():\n    return row[:n], row[a:b]\n")
    assert told.kind is Kind.AMBIGUOUS
    assert "both 'row[:$n]' (line 2) and upstream's cure 'row[$_:$_]'" in told.lines[0]


def test_what_earlier_patches_did_is_not_taken_for_present_or_upstream() -> None:
    pristine = Source(b"def f():\n    a()\n    b()\n", "shop.py")
    current = Source(b"def f():\n    a()\n    ours()\n    b()\n", "shop.py")
    (file,) = on_shop("@@ f\n  a()\n+ ours()\n= ours()\n").files
    result = resolve_file(file, current, pristine)
    assert [one.standing for one in result.hunks] == [Standing.APPLIED]


# alternatives and optional hunks ----------------------------------------------------------------


def test_alternative_that_fits_is_taken() -> None:
    hunks = "@@ New.f\n- a($x)\n+ b($x)\n@@ or f\n- a($x)\n+ b($x)\n"
    assert laid("def f():\n    a(1)\n", hunks) == "def f():\n    b(1)\n"


def test_two_alternatives_that_fit_are_ambiguous() -> None:
    code = "def f():\n    a(1)\n\n\ndef g():\n    a(1)\n"
    told = misfit("@@ f\n- a($x)\n+ b($x)\n@@ or g\n- a($x)\n+ b($x)\n", code)
    assert told.kind is Kind.AMBIGUOUS
    assert told.lines[0].startswith("2 alternatives fit (lines 12, 15 of the seam)")


def test_alternatives_with_one_replacement_are_present_together() -> None:
    hunks = "@@ f\n- a($x)\n+ b($x)\n@@ or f\n- old.a($x)\n+ b($x)\n"
    for code in ("def f():\n    a(1)\n", "def f():\n    old.a(1)\n"):
        (again,) = lay(laid(code, hunks), hunks).hunks
        assert again.standing is Standing.PRESENT


def test_no_alternative_that_fits_tells_why_of_each() -> None:
    told = misfit("@@ f\n- a($x)\n+ b($x)\n@@ or g\n- a($x)\n+ b($x)\n", "def h(): ...\n")
    assert told.lines[0] == "none of 2 alternatives fits"
    assert "no f in shop.py" in told.lines and "no g in shop.py" in told.lines


OPTIONAL = "@@ f\n- a($x)\n+ b($x)\n\n@@? g\n- a($x)\n+ b($x)\n\n! a($*_)\n"


def test_optional_hunk_may_be_absent() -> None:
    result = lay("def f():\n    a(1)\n", OPTIONAL)
    assert [one.standing for one in result.hunks] == [Standing.APPLIED, Standing.ABSENT]
    result = lay("def f():\n    a(1)\n\n\ndef g():\n    c(1)\n", OPTIONAL)
    assert [one.standing for one in result.hunks] == [Standing.APPLIED, Standing.ABSENT]


def test_optional_insertion_is_not_absent_where_only_its_anchor_is() -> None:
    told = misfit("@@? f\n  a()\n+ b()\n\n! never()\n", "def f():\n    c()\n")
    assert told.kind is Kind.NO_ANCHOR


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    a(1)\n\n\ndef h():\n    a(2)\n",
        "def f():\n    a(1)\n\n\na(2)\n",
        "def f():\n    a(1)\n\n\n@a(2)\ndef h(): ...\n",
        "def f():\n    a(1)\n\n\nclass C:\n    x = a(2)\n",
    ],
)
def test_post_condition_sees_what_is_left_anywhere(code: str) -> None:
    told = misfit(OPTIONAL, code)
    assert told.kind is Kind.LEFT_OVER
    assert "still reads 'a($*_)'" in told.lines[0]
    assert told.line == 20


# misfits ---------------------------------------------------------------------------------------


def test_missing_scope_names_what_is_close() -> None:
    told = misfit("@@ Shop.sel\n+ log()")
    assert told.kind is Kind.NO_SCOPE
    assert told.lines == ("no Shop.sel in shop.py", "names close to it: sell")
    assert told.line == 13


def test_scope_that_is_defined_twice_is_refused() -> None:
    told = misfit("@@ f\n+ log()", "def f(): ...\n\n\ndef f(): ...\n")
    assert told.lines == ("f is defined 2 times in shop.py (lines 1, 4)",)


def test_scope_in_a_block_is_found() -> None:
    code = """\
        if x:
            def f():
                a()
        else:
            try:
                def g():
                    a()
            except E:
                pass
        """
    assert "        ours()\n        a()" in laid(code, "@@ f\n+ ours()")
    assert "            ours()\n            a()" in laid(code, "@@ g\n+ ours()")


def test_missing_anchor_tells_the_nearest_and_elsewhere() -> None:
    code = """\
        class C:
            def f(self):
                self.free(idx)

            def g(self):
                self.drop(idx)
        """
    told = misfit("@@ C.f\n- self.drop($x)\n+ ours($x)", code)
    assert told.kind is Kind.NO_ANCHOR
    assert told.lines == (
        "C.f: nothing reads 'self.drop($x)'",
        "nearest   shop.py:3: self.free(idx)",
        "elsewhere shop.py:6: C.g reads it",
    )
    assert told.line == 13


@pytest.mark.parametrize("scope", ["f", "f x3"])
def test_anchor_that_fits_another_number_of_places_is_ambiguous(scope: str) -> None:
    told = misfit(f"@@ {scope}\n- a($x)\n+ b($x)", "def f():\n    a(1)\n    a(2)\n")
    assert told.kind is Kind.AMBIGUOUS
    assert told.lines[0].startswith("f: 2 places read 'a($x)' (lines 2, 3); the seam names ")


def test_number_of_places_may_be_named() -> None:
    code = "def f():\n    a(1)\n    a(2)\n"
    assert laid(code, "@@ f x2\n- a($x)\n+ b($x)") == "def f():\n    b(1)\n    b(2)\n"


def test_missing_head_is_told() -> None:
    told = misfit("@@ f\n  if x:\n- a()\n+ b()", "def f():\n    a()\n")
    assert told.lines[0] == "f: nothing reads 'if x:'"


def test_two_seams_at_one_place_overlap() -> None:
    told = misfit("@@ f\n- a(b)\n+ c(b, 1)\n\n- b\n+ d\n", "def f():\n    a(b)\n")
    assert told.kind is Kind.OVERLAP


@pytest.mark.parametrize(
    ("code", "hunks"),
    [
        ("def f():\n    a(); b()\n", "@@ f\n+ c()\n  b()"),
        ("def f():\n    a(); b()\n", "@@ f\n  a()\n+ c()"),
        ("def f():\n    if x: a()\n", "@@ f\n+ c()\n  a()"),
        ("def f(): a()\n", "@@ f\n+ c()"),
        ("def f(): 'doc'\n", "@@ f\n+ c()"),
        ("def f():\n    'doc'; a()\n", "@@ f\n+ c()"),
        ("def f():\n    if x:\n        a()\n    elif y:\n        b()\n", "@@ f\n+ c()\n  if y:"),
        ("def f():\n    if x: a()\n", "@@ f\n- a()\n+ if c:\n+     a()"),
        ("def f():\n    a(); b()\n", "@@ f\n- a()\n+ if c:\n+     a()"),
    ],
)
def test_anchor_that_shares_its_line_is_a_bad_place(code: str, hunks: str) -> None:
    assert misfit(hunks, code).kind is Kind.BAD_PLACE


def test_elif_can_be_rewritten_in_its_test() -> None:
    code = "def f():\n    if x:\n        a()\n    elif y > 1:\n        b()\n"
    assert "    elif y > 2:\n" in laid(code, "@@ f\n- if y > 1:\n+ if y > 2:")


# the text of replacements ------------------------------------------------------------------------


def test_only_the_child_that_differs_is_rewritten() -> None:
    code = "def f():\n    x = row[i][\n        :n  # all\n    ]\n    g(\n        a,  # one\n"
    code += "        b,\n    )\n"
    new = laid(code, "@@ f\n- row[$i][:$n]\n+ row[$i][k : k + $n]\n\n- g($x, b)\n+ g($x, c)")
    assert new == code.replace(":n  #", "k : k + n  #").replace("b,\n", "c,\n")


@pytest.mark.parametrize(
    ("before", "minus", "plus", "after"),
    [
        ("g(a)", "g($x, $*r)", "h($x, 1, $*r)", "h(a, 1)"),
        ("g(a, k=2)", "g($x, $*r)", "h($x, 1, $*r)", "h(a, 1, k=2)"),
        ("g()", "g($*r)", "h($*r)", "h()"),
        ("g()", "g($*r)", "h($*r, 1)", "h(1)"),
        ("g(a, k=1, m=2)", "g($*r, k=$k)", "h($*r)", "h(a, m=2)"),
        ("x = g(a or b)", "g($x)", "$x.y", "x = (a or b).y"),
        ("x = g(a + b)", "g($x)", "h($x)", "x = h(a + b)"),
        ("x = g(a for a in b)", "g($x)", "h(g($x))", "x = h(g((a for a in b)))"),
        ("x = g(a for a in b)", "g($x)", "h($x)", "x = h(a for a in b)"),
        ("x = g(a)", "g($x)", "$x * 2", "x = a * 2"),
        ("x = g(a) * y", "g($x)", "($x + 1)", "x = (a + 1) * y"),
        ("x = add(a, b) * y", "add($l, $r)", "($l + $r)", "x = (a + b) * y"),
        ("x = a * y", "a * $y", "(a + b) * $y", "x = (a + b) * y"),
        ("x.total = 1", "x.$n = 1", "x.$n = 2", "x.total = 2"),
        ("x = g(i for i in y)", "g($*a)", "h($*a)", "x = h(i for i in y)"),
        ("x = y[1:2]", "y[$a:$b]", "y[$a:$b:1]", "x = y[1:2:1]"),
        ("del x", "del x", "x.close()", "x.close()"),
        ("a(); b()", "a()", "c()", "c(); b()"),
    ],
)
def test_holes_keep_their_meaning(before: str, minus: str, plus: str, after: str) -> None:
    code = f"def f():\n    {before}\n"
    assert laid(code, f"@@ f\n- {minus}\n+ {plus}") == f"def f():\n    {after}\n"


@pytest.mark.parametrize(
    ("code", "hunk"),
    [
        ("a * d", "- a\n+ b + c"),
        ("add(a, b) * d", "- add($x, $y)\n+ $x + $y"),
        ("d - minus(a)", "- minus($x)\n+ $x - 1"),
        ("not a", "- a\n+ a or b"),
        ("a.b", "- a\n+ a if c else d"),
        ("f(a)", "- a\n+ a, b"),
    ],
)
def test_replacement_that_would_bind_otherwise_is_refused(code: str, hunk: str) -> None:
    told = misfit(f"@@ f\n{hunk}", f"def f():\n    return {code}\n")
    assert told.kind is Kind.BROKEN
    assert "put the '+' expression in parentheses" in told.lines[1]


def test_hole_that_spans_lines_moves_with_its_indent() -> None:
    code = "def f():\n    g(\n        a,\n        b,\n    )\n"
    new = laid(code, "@@ f\n- g($*x)\n+ if y:\n+     h($*x)")
    assert new == "def f():\n    if y:\n        h(a,\n            b)\n"


def test_string_that_spans_lines_is_not_moved() -> None:
    code = 'def f():\n    g("""a\nb""")\n'
    new = laid(code, "@@ f\n- g($x)\n+ if y:\n+     g($x)")
    assert new == 'def f():\n    if y:\n        g("""a\nb""")\n'


def test_head_that_changes_in_more_than_a_part_is_refused() -> None:
    told = misfit("@@ f\n- if x:\n+ while x:", "def f():\n    if x:\n        a()\n")
    assert told.kind is Kind.BAD_PATTERN


def test_names_and_places_of_edits_are_told() -> None:
    (edit,) = lay(CODE, "@@ Shop.sell\n- each.move($n, $*rest)\n+ each.lift($n, $*rest)").edits
    assert edit.holes == {"n": "1", "rest": "fast=True"}
    assert edit.seam.line == 13
    assert CODE.encode()[edit.whole.start :].startswith(b"each.move(\n")
