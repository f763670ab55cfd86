# SPDX-License-Identifier: Apache-2.0
"""A series is resolved whole: outcomes, what patches may lean on, and stamps that hold."""

from __future__ import annotations

import ast

import pytest
from workshop import layer, patch

from seam import stamp
from seam.errors import Kind, Misfit
from seam.layer import Outcome, PatchResult
from seam.seamfile import Patch

SHOP = {"shop.py": "import os\n\n\ndef f():\n    a(1)\n    b(2)\n    return c(3)\n"}
SALES = "python/sglang/srt/sales.py"


def one(*body: str, files: dict[str, str] | None = None, **ours: str) -> PatchResult:
    """The result of a single patch on the shop."""
    made = patch("\n".join(body))
    added = {f"python/sglang/srt/{name}.py": text for name, text in ours.items()}
    return layer(files or SHOP, [made], added)["a-patch"]


def misfit(result: PatchResult) -> Misfit:
    """The only misfit of a result."""
    assert result.outcome is Outcome.ERROR and not result.changes
    (told,) = result.misfits
    return told


REPLACE = "+++ shop.py\n@@ f\n- a($x)\n+ abs($x)\n= upstream($*_)"


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("def f():\n    a(1)\n", Outcome.APPLIED),
        ("def f():\n    abs(1)\n", Outcome.PRESENT),
        ("def f():\n    upstream(1)\n", Outcome.UPSTREAM),
        ("def f():\n    pass\n", Outcome.ERROR),
    ],
)
def test_outcome_of_a_patch(code: str, outcome: Outcome) -> None:
    assert one(REPLACE, files={"shop.py": code}).outcome is outcome


def test_upstream_needs_every_hunk_to_be_there_and_one_to_be_cured() -> None:
    more = REPLACE + "\n\n@@ g\n- a($x)\n+ abs($x)"
    cured = "def f():\n    upstream(1)\n\n\n"
    there = one(more, files={"shop.py": cured + "def g():\n    abs(1)\n"})
    assert there.outcome is Outcome.UPSTREAM and not there.changes
    assert there.notes == ("shop.py:2 f reads 'upstream($*_)'",)
    mixed = one(more, files={"shop.py": cured + "def g():\n    a(1)\n"})
    assert mixed.outcome is Outcome.APPLIED


def test_patch_outside_its_releases_is_not_for_this_release() -> None:
    assert one("releases: .. 0.5.22", REPLACE).outcome is Outcome.NOT_FOR_RELEASE
    assert one("releases: 0.5.23 ..", REPLACE).outcome is Outcome.APPLIED


def test_file_outside_its_releases_is_left_alone() -> None:
    ranged = "+++ gone.py releases .. 0.5.22\n@@ f\n- a($x)\n+ abs($x)\n\n"
    assert one(ranged + REPLACE).outcome is Outcome.APPLIED
    assert one(ranged).outcome is Outcome.NOT_FOR_RELEASE


def test_first_path_that_exists_is_taken() -> None:
    result = one(REPLACE.replace("shop.py", "new.py | shop.py"))
    assert "python/sglang/srt/shop.py" in result.changes


def test_missing_file_is_told_unless_every_hunk_is_optional() -> None:
    told = misfit(one(REPLACE.replace("shop.py", "new.py | newer.py")))
    assert (told.kind, told.lines[0]) == (
        Kind.NO_FILE,
        "none of new.py, newer.py is in this release",
    )
    optional = "\n\n+++ new.py\n@@? f\n- a($x)\n+ abs($x)\n! a($*_)"
    assert one(REPLACE + optional).outcome is Outcome.APPLIED


def test_patch_of_which_nothing_has_its_place_is_an_error() -> None:
    assert misfit(one("+++ shop.py\n@@? g\n- d($x)\n+ abs($x)\n! d($*_)")).kind is Kind.NO_ANCHOR


def test_scope_that_moved_is_found_in_the_other_files() -> None:
    files = {**SHOP, "b.py": "class B:\n    def g(self): ...\n", "d.py": "def other(): ...\n"}
    told = misfit(one("+++ shop.py\n@@ A.g\n+ abs(1)\n@@ or B.g\n+ abs(1)", files=files))
    assert told.lines == ("none of 2 alternatives fits", "no A in shop.py", "no B in shop.py")
    told = misfit(one("+++ shop.py\n@@ g\n+ abs(1)", files=files))
    assert told.lines == ("no g in shop.py", "defined in b.py :: B.g")


# files of ours ---------------------------------------------------------------------------------

USE = "+++ shop.py\n@@ import\n+ from sglang.srt import sales\n\n@@ f\n+ sales.count()\n"


def test_added_file_is_part_of_the_commit() -> None:
    result = one(f"adds {SALES}", USE, sales="def count(): ...\n")
    assert result.changes[SALES] == b"def count(): ...\n"


def test_added_file_that_is_there_with_other_content_is_an_error() -> None:
    files = {**SHOP, "sales.py": "theirs = 1\n"}
    told = misfit(one(f"adds {SALES}", USE, files=files, sales="def count(): ...\n"))
    assert told.kind is Kind.EXISTS


def test_everything_there_already_is_present() -> None:
    files = {
        "shop.py": "from sglang.srt import sales\n\n\ndef f():\n    sales.count()\n",
        "sales.py": "def count(): ...\n",
    }
    result = one(f"adds {SALES}", USE, files=files, sales="def count(): ...\n")
    assert result.outcome is Outcome.PRESENT


def test_hunks_without_their_module_are_not_present() -> None:
    files = {"shop.py": "from sglang.srt import sales\n\n\ndef f():\n    sales.count()\n"}
    result = one(f"adds {SALES}", USE, files=files, sales="def count(): ...\n")
    assert result.outcome is Outcome.APPLIED
    assert set(result.changes) == {SALES, stamp.path_of("a-patch")}


def test_import_of_a_module_that_nobody_adds_is_an_error() -> None:
    told = misfit(one(USE))
    assert told.kind is Kind.NO_MODULE and "sglang.srt.sales" in told.lines[0]


def test_import_of_a_name_of_a_module_is_allowed() -> None:
    files = {**SHOP, "till.py": "def ring(): ...\n"}
    use = USE.replace("srt import sales", "srt.till import {}").replace("sales.count", "{}")
    assert one(use.replace("{}", "ring"), files=files).outcome is Outcome.APPLIED
    assert misfit(one(use.replace("{}", "sing"), files=files)).kind is Kind.NO_MODULE


def test_name_that_nothing_binds_is_an_error() -> None:
    told = misfit(one("+++ shop.py\n@@ f\n+ sales.count(len(os.sep))"))
    assert told.kind is Kind.UNBOUND
    assert told.lines[0] == "'+' lines use sales, which nothing in shop.py binds"


@pytest.mark.parametrize(
    ("code", "hunk", "reason"),
    [
        (
            "def g():\n    import q\n\n\ndef f():\n    pass\n",
            "f\n+ q()",
            "nothing in shop.py binds",
        ),
        ("if TYPE_CHECKING:\n    import q\n\n\ndef f():\n    pass\n", "f\n+ q()", "when it runs"),
        ("class C:\n    q = 1\n\n    def f(self):\n        pass\n", "C.f\n+ q()", "when it runs"),
        ("def f():\n    pass\n\n\nimport q\n", "f\n+ @q", "run before q is bound (line 5)"),
        (
            "class C:\n    def f(self):\n        pass\n\n\nq = 1\n",
            "C.f\n+ @q",
            "run before q is bound",
        ),
        ("class C:\n    x = 1\n\n\nimport q\n", "C\n+ y = q.z", "run before q is bound"),
    ],
)
def test_name_that_is_not_bound_where_the_lines_run_is_an_error(
    code: str, hunk: str, reason: str
) -> None:
    told = misfit(one(f"+++ shop.py\n@@ {hunk}", files={"shop.py": code}))
    assert told.kind is Kind.UNBOUND and reason in told.lines[0]


@pytest.mark.parametrize(
    ("code", "hunk"),
    [
        ("def f():\n    import q\n", "f\n  import q\n+ q()"),
        ("def f(*q):\n    pass\n", "f\n+ q()"),
        ("def g(q):\n    def f():\n        pass\n", "g.f\n+ q()"),
        ("try:\n    import q\nexcept E:\n    q = None\n\n\ndef f():\n    pass\n", "f\n+ q()"),
        ("def f():\n    pass\n\n\nimport q\n", "f\n+ q()"),
        ("from q import *\n\n\ndef f():\n    pass\n", "f\n+ q()"),
        ("class C:\n    def q(self): ...\n\n    def f(self):\n        pass\n", "C.f\n+ @q"),
        ("with q() as r:\n    pass\n\n\ndef f():\n    pass\n", "f\n+ @r"),
    ],
)
def test_name_that_is_bound_where_the_lines_run_is_allowed(code: str, hunk: str) -> None:
    result = one(f"+++ shop.py\n@@ {hunk}", files={"shop.py": code})
    assert result.outcome is Outcome.APPLIED, result.misfits


def test_names_bound_by_the_lines_themselves_are_allowed() -> None:
    body = "+++ shop.py\n@@ f\n+ for each in os.path:\n+     kept = (each, lambda way: way)\n"
    assert one(body).outcome is Outcome.APPLIED


# patches that lean on each other -----------------------------------------------------------------


def sales(name: str, *lines: str, head: str = "") -> Patch:
    """A patch that adds the module `sales`, or needs it."""
    return patch(f"{head}\n{USE.replace('sales.count()', lines[0])}", name)


ADDS = f"adds {SALES}\n"
OURS = {SALES: "def count(): ...\n"}


def test_patch_may_use_what_a_needed_patch_adds() -> None:
    first = sales("first", "sales.count(1)", head=ADDS)
    second = sales("second", "sales.count(2)", head="needs: first")
    results = layer(SHOP, [first, second], OURS)
    assert [result.outcome for result in results.values()] == [Outcome.APPLIED] * 2
    shop = results["second"].changes["python/sglang/srt/shop.py"].decode()
    assert shop.count("import sales") == 1
    assert shop.index("count(2)") < shop.index("count(1)")


def test_patch_may_not_use_what_an_earlier_patch_adds_without_needing_it() -> None:
    first = sales("first", "sales.count(1)", head=ADDS)
    results = layer(SHOP, [first, patch("+++ shop.py\n@@ f\n+ sales.count(2)")], OURS)
    assert misfit(results["a-patch"]).kind is Kind.UNBOUND


def test_needed_patch_that_failed_or_is_missing_is_an_error() -> None:
    second = patch("needs: first\n" + REPLACE)
    assert "which is not laid before it" in misfit(layer(SHOP, [second])["a-patch"]).lines[0]
    first = patch("releases: .. 0.5.9\n" + REPLACE, "first")
    told = misfit(layer(SHOP, [first, second])["a-patch"])
    assert told.lines == ("needs first, which is: not for this release",)


def test_patch_that_does_not_fit_changes_nothing_for_the_next() -> None:
    broken = patch("+++ shop.py\n@@ f\n- b($x)\n+ abs($x)\n\n@@ nowhere\n+ abs(1)", "broken")
    results = layer(SHOP, [broken, patch(REPLACE)])
    text = results["a-patch"].changes["python/sglang/srt/shop.py"].decode()
    assert "b(2)" in text and "abs(1)" in text


def test_every_file_that_does_not_fit_is_told() -> None:
    result = one("+++ shop.py\n@@ g\n+ abs(1)\n\n+++ gone.py\n@@ g\n+ abs(1)")
    assert [told.kind for told in result.misfits] == [Kind.NO_SCOPE, Kind.NO_FILE]


def test_imports_of_two_patches_keep_a_line_of_upstream_between() -> None:
    shop = {"shop.py": "import os\nimport sys\nimport json\n\n\ndef f():\n    a(1)\n    b(2)\n"}
    ours = {f"python/sglang/srt/{name}.py": "" for name in ("one", "two")}
    body = "adds python/sglang/srt/{0}.py\n+++ shop.py\n@@ import\n+ from sglang.srt import {0}\n"
    first = patch(body.format("one") + "@@ f\n- a($x)\n+ one.a($x)", "first")
    second = patch(body.format("two") + "@@ f\n- b($x)\n+ two.b($x)", "second")
    for order in ([first, second], [second, first]):
        result = layer(shop, order, ours)[order[-1].name]
        lines = result.changes["python/sglang/srt/shop.py"].decode().splitlines()
        places = [at for at, line in enumerate(lines) if "sglang" in line]
        assert places[1] - places[0] == 2


def test_patch_that_rewrites_an_earlier_one_overlaps() -> None:
    first = patch("+++ shop.py\n@@ f\n- a($x)\n+ abs($x, 0)", "first")
    second = patch("+++ shop.py\n@@ f\n- abs($x, 0)\n+ abs($x, 9)", "second")
    told = misfit(layer(SHOP, [first, second])["second"])
    assert told.kind is Kind.OVERLAP
    assert told.lines[0] == "rewrites what first put there"
    assert told.lines[1].endswith("shop.py: 0 of 1 left: abs(1, 0)")


# stamps ----------------------------------------------------------------------------------------


def test_stamp_says_what_the_patch_left() -> None:
    result = one(f"adds {SALES}", USE, sales="def count(): ...\n")
    text = result.changes["python/sglang/srt/pd_series/stamps/a_patch.py"]
    assert text.startswith(b"# SPDX-License-Identifier: Apache-2.0\n")
    assert ast.get_docstring(ast.parse(text), clean=False) is not None
    read = stamp.parse(text, "stamp")
    assert read == result.stamp
    assert (read.patch, read.subject, read.release) == ("a-patch", "area: what it does", "0.5.23")
    assert list(read.adds) == [SALES]
    assert read.lines == {
        "python/sglang/srt/shop.py": {"from sglang.srt import sales": 1, "sales.count()": 1}
    }
    assert read.render() == text


def test_stamp_keeps_lines_that_tell() -> None:
    code = "def f(x):\n    if x:\n        return\n    a(1)\n"
    body = "+++ shop.py\n@@ f\n+ if x is None:\n+     return\n  a($_)\n"
    result = one(body, files={"shop.py": code})
    assert result.stamp is not None
    assert result.stamp.lines == {"python/sglang/srt/shop.py": {"if x is None:": 1}}
    only = one("+++ shop.py\n@@ f\n+ return\n  a($_)\n", files={"shop.py": code})
    assert only.stamp is not None
    assert only.stamp.lines == {"python/sglang/srt/shop.py": {"return": 2}}


def test_tests_of_a_patch_are_not_stamped() -> None:
    path = "test/registered/unit/test_sales.py"
    made = patch(f"adds {path}\n{REPLACE}")
    result = layer(SHOP, [made], {path: "assert True\n"})["a-patch"]
    assert path in result.changes
    assert result.stamp is not None and result.stamp.adds == {}


def test_broken_stamp_names_each_thing_that_is_gone() -> None:
    result = one(f"adds {SALES}", USE, sales="def count(): ...\n")
    assert result.stamp is not None
    files = dict(result.changes)
    assert not list(result.stamp.broken(files.get))
    files[SALES] = b"changed\n"
    files["python/sglang/srt/shop.py"] = b"from sglang.srt import sales\n"
    assert [line.partition(": ")[2] for line in result.stamp.broken(files.get)] == [
        "the file is not the one that a-patch added",
        "0 of 1 left: sales.count()",
    ]
    assert "the file is missing" in next(result.stamp.broken({}.get))
