# SPDX-License-Identifier: Apache-2.0
"""`seam refresh` takes the edits of a built tree back, all of them or none."""

from __future__ import annotations

from pathlib import Path

import pytest
from workshop import FILES, MESSAGE, SEAMS, Workshop, git

from seam.cli import main

SHOP = "python/sglang/srt/shop.py"
TILL = "python/sglang/srt/till.py"
SALES = "python/sglang/srt/sales.py"


@pytest.fixture
def tree(workshop: Workshop) -> Path:
    """A built tree of the newest release."""
    folder = workshop.folder / "tree"
    assert main(["tree", str(folder)]) == 0
    return folder


def change(folder: Path, path: str, old: str, new: str) -> None:
    """Edit a file; what is edited must be there."""
    text = (folder / path).read_text()
    assert old in text
    (folder / path).write_text(text.replace(old, new))


def seam(workshop: Workshop, name: str) -> str:
    """The hunks of a seam file."""
    return (workshop.root / f"series/{name}.seam").read_text().partition("---\n")[2]


def kept(workshop: Workshop) -> dict[str, bytes]:
    """Every file of the repository."""
    files = (path for path in workshop.root.rglob("*") if path.is_file())
    return {path.relative_to(workshop.root).as_posix(): path.read_bytes() for path in files}


def test_tree_without_edits_changes_nothing(
    workshop: Workshop, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, head = kept(workshop), git(tree, "rev-parse", "HEAD")
    assert main(["refresh", str(tree)]) == 0
    assert "has no edits" in capsys.readouterr().out
    assert kept(workshop) == before and git(tree, "rev-parse", "HEAD") == head


def test_modules_and_tests_are_copied_back(workshop: Workshop, tree: Path) -> None:
    change(tree, SALES, "return item", "return item + 1")
    change(tree, "test/registered/unit/test_sales.py", "assert True", "assert 1")
    assert main(["refresh", str(tree)]) == 0
    assert "item + 1" in (workshop.root / SALES).read_text()
    assert (workshop.root / "test/registered/unit/test_sales.py").read_text() == "assert 1\n"


def test_refreshed_tree_is_the_one_that_would_be_built(workshop: Workshop, tree: Path) -> None:
    change(tree, SALES, "return item", "return item + 1")
    change(tree, SHOP, "sales.count(item)", "sales.count(item, 2)")
    assert main(["refresh", str(tree)]) == 0
    other = workshop.folder / "other"
    assert main(["tree", str(other)]) == 0
    assert git(tree, "rev-parse", "HEAD") == git(other, "rev-parse", "HEAD")
    assert git(tree, "status", "--porcelain") == ""
    assert git(tree, "for-each-ref") == git(other, "for-each-ref")
    assert main(["status", str(tree)]) == 0
    assert main(["tree", str(tree), "--replace"]) == 0


def test_inserted_line_is_edited_and_others_are_added(workshop: Workshop, tree: Path) -> None:
    change(tree, SHOP, "sales.count(item)", "sales.count(item, 'x')\n        sales.count(2)")
    assert main(["refresh", str(tree)]) == 0
    assert "  till.open($item)\n+ sales.count($item, 'x')\n+ sales.count(2)\n" in (
        seam(workshop, "count-sales").replace("(item, 'x')", "($item, 'x')")
    )


def refreshed(workshop: Workshop, hunk: str, old: str, new: str) -> str:
    """The hunk of `till.py` after an edit of the tree it makes."""
    head = "needs: count-sales\n"  # its lines may be beside ours
    alone = {"close-till": MESSAGE + f"{head}+++ shop.py\n{hunk}\n"}
    workshop.write_series({"count-sales": SEAMS["count-sales"], **alone})
    (workshop.root / "series/round-total.seam").unlink()
    tree = workshop.folder / "tree"
    assert main(["tree", str(tree)]) == 0
    change(tree, SHOP, old, new)
    assert main(["refresh", str(tree)]) == 0
    return seam(workshop, "close-till").removeprefix(f"{head}+++ shop.py\n").strip()


@pytest.mark.parametrize(
    ("hunk", "old", "new", "after"),
    [
        (
            "@@ Shop.sell\n- till.close($what)\n+ abs($what)",
            "abs(item)",
            "abs(item, price, item)",
            "@@ Shop.sell\n- till.close($what)\n+ abs($what, price, $what)",
        ),
        (
            "@@ Shop.sell\n- till.close($*all)\n+ abs(1, $*all)",
            "abs(1, item)",
            "abs(2, item)",
            "@@ Shop.sell\n- till.close($*all)\n+ abs(2, $*all)",
        ),
        (
            "@@ Shop.sell\n- till.close($what, $*rest)\n+ abs($what, 1, $*rest)",
            "abs(item, 1)",
            "max(item, 1, 2)",
            "@@ Shop.sell\n- till.close($what, $*rest)\n+ max($what, 1, 2, $*rest)",
        ),
        (
            "@@ Shop.sell\n- till.close($what, $*rest)\n+ abs($*rest)",
            "abs()",
            "abs(5)",
            "@@ Shop.sell\n- till.close($what, $*rest)\n+ abs(5)",
        ),
        (
            "@@ Shop.sell\n- self.total = $sum\n+ self.total = abs($sum)",
            "abs(",
            "max(0, ",
            "@@ Shop.sell\n- self.total = $sum\n+ self.total = max(0, $sum)",
        ),
        (
            "@@ Shop.sell\n- return $value\n+ if abs(1):\n+     return $value",
            "if abs(1):\n            return till",
            "if abs(2):\n            print(item)\n            return till",
            "@@ Shop.sell\n- return $value\n+ if abs(2):\n+     print(item)\n+     return $value",
        ),
        (
            "@@ Shop.sell\n+ print(self)\n+ print()",
            "print(self)",
            "# a remark\n        print(self, 1)",
            "@@ Shop.sell\n+ # a remark\n+ print(self, 1)\n+ print()",
        ),
        (
            "@@ Shop.sell\n+ @property",
            "@property",
            "@staticmethod",
            "@@ Shop.sell\n+ @staticmethod",
        ),
    ],
)
def test_edit_goes_into_the_plus_lines_and_keeps_their_holes(
    workshop: Workshop, hunk: str, old: str, new: str, after: str
) -> None:
    assert refreshed(workshop, hunk, old, new) == after


def test_alternatives_with_the_same_lines_change_together(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    hunk = (
        "@@ Shop.sell\n- till.close($x)\n+ abs($x)\n"
        "@@ or Shop.give\n- till.close($x)\n+ abs($x)\n"
        "@@ or Shop.take\n- till.shut()\n+ abs(3)"
    )
    after = refreshed(workshop, hunk, "abs(item)", "max(item, 1)")
    assert after.count("+ max($x, 1)") == 2
    assert "left as it is, an alternative with other '+' lines" in capsys.readouterr().out


def test_alternative_that_lacks_a_hole_is_left_and_named(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    hunk = "@@ Shop.sell\n- till.close($x)\n+ abs(1)\n@@ or Shop.give\n- till.shut()\n+ abs(1)"
    after = refreshed(workshop, hunk, "abs(1)", "abs(item)")
    assert "+ abs($x)" in after and "+ abs(1)" in after
    assert "left as it is, its anchor does not bind $x" in capsys.readouterr().out


# refusals ----------------------------------------------------------------------------------------


def refused(
    workshop: Workshop, tree: Path, capsys: pytest.CaptureFixture[str], status: int = 1
) -> str:
    """What is told when a refresh is refused; nothing may have changed anywhere."""
    before, head = kept(workshop), git(tree, "rev-parse", "HEAD")
    edits = git(tree, "diff", "HEAD")
    capsys.readouterr()
    assert main(["refresh", str(tree)]) == status
    assert kept(workshop) == before
    assert git(tree, "rev-parse", "HEAD") == head and git(tree, "diff", "HEAD") == edits
    return capsys.readouterr().err


def test_edit_of_a_file_of_upstream_is_refused(
    workshop: Workshop, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(tree, SALES, "return item", "return item + 1")
    change(tree, SHOP, "return till.close(item)", "return till.close(item + 1)")
    assert "nothing was written" in refused(workshop, tree, capsys)


def test_deleted_lines_and_files_and_new_files_are_refused(
    workshop: Workshop, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(tree, SHOP, "        sales.count(item)\n", "")
    assert "its lines were deleted; take the hunk out" in refused(workshop, tree, capsys)
    git(tree, "checkout", "--quiet", ".")
    (tree / SALES).unlink()
    assert f"{SALES} was deleted" in refused(workshop, tree, capsys)
    git(tree, "checkout", "--quiet", ".")
    (tree / TILL).unlink()
    assert f"{TILL} was deleted" in refused(workshop, tree, capsys)
    git(tree, "checkout", "--quiet", ".")
    (tree / "python/sglang/srt/more.py").write_text("")
    assert "more.py is new: write 'adds python" in refused(workshop, tree, capsys)


def test_new_file_that_a_patch_adds_is_taken(workshop: Workshop, tree: Path) -> None:
    (tree / "python/sglang/srt/more.py").write_text("MORE = 1\n")
    path = workshop.root / "series/close-till.seam"
    path.write_text(path.read_text().replace("+++", "adds python/sglang/srt/more.py\n\n+++"))
    assert main(["refresh", str(tree)]) == 0
    assert (workshop.root / "python/sglang/srt/more.py").read_text() == "MORE = 1\n"
    assert git(tree, "status", "--porcelain") == ""


def test_change_on_both_sides_is_refused(
    workshop: Workshop, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(tree, SALES, "return item", "return item + 1")
    workshop.write(SALES, "def count(item): ...\n")
    assert "was changed both here and in the repository" in refused(workshop, tree, capsys)
    git(tree, "checkout", "--quiet", ".")
    change(tree, SHOP, "sales.count(item)", "sales.count(1)")
    file = workshop.root / "series/count-sales.seam"
    file.write_text(file.read_text().replace("+ sales.count(item)", "+ sales.count(3)"))
    assert "the series changed what it puts there since" in refused(workshop, tree, capsys)


def test_change_on_the_other_side_alone_comes_to_the_tree(workshop: Workshop, tree: Path) -> None:
    workshop.write(SALES, "def count(item): ...\n")
    change(tree, TILL, "assert item", "assert item, 1")
    assert main(["refresh", str(tree)]) == 0
    assert (tree / SALES).read_text() == "def count(item): ...\n"
    assert "+ assert item, 1" in seam(workshop, "close-till")


def test_seam_of_several_places_is_edited_at_all_of_them(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    workshop.write(
        "series/close-till.seam",
        MESSAGE
        + "needs: round-total\n+++ shop.py\n@@ Shop.sell x2\n"
        + "- till.$what(item)\n+ max(till.$what, item)\n",
    )
    tree = workshop.folder / "tree"
    assert main(["tree", str(tree)]) == 0
    change(tree, SHOP, "max(till.open, item)", "max(till.open, item, 1)")
    assert "stands at 2 places; edit all of them alike" in refused(workshop, tree, capsys)
    change(tree, SHOP, "max(till.close, item)", "max(till.close, item, 1)")
    assert main(["refresh", str(tree)]) == 0
    assert "+ max(till.$what, item, 1)" in seam(workshop, "close-till")


def test_too_many_lines_are_refused(
    workshop: Workshop, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(tree, SHOP, "sales.count(item)", "\n        ".join(["sales.count(item)"] * 7))
    assert "7 '+' lines, at most 6; move them into a module" in refused(workshop, tree, capsys)


def test_broken_python_is_refused(
    workshop: Workshop, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(tree, SHOP, "sales.count(item)", "sales.count(item")
    assert "not Python" in refused(workshop, tree, capsys)


def test_folders_that_are_no_built_tree_are_refused(
    workshop: Workshop, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = workshop.checkout()
    assert "is not a tree that seam built" in refused(workshop, checkout, capsys)
    assert main(["refresh", str(workshop.folder / "none")]) == 1
    assert "is not a folder" in capsys.readouterr().err
    change(tree, SALES, "return item", "return item + 1")
    git(tree, "commit", "--quiet", "--all", "--message=mine")
    told = refused(workshop, tree, capsys)
    assert "has commits of its own; make them edits again" in told
    for command in told.strip().partition("again: ")[2].split(" && "):
        git(tree, *command.removeprefix("git ").split())
    assert main(["refresh", str(tree)]) == 0
    assert "item + 1" in (workshop.root / SALES).read_text()


def test_errors_on_other_releases_end_with_status_1(
    workshop: Workshop, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(tree, SHOP, "sales.count(item)", "sales.count(os)")
    shop = {"sglang/srt/shop.py": FILES["sglang/srt/shop.py"].replace("import os\n", "")}
    releases = workshop.root / "series/releases.toml"
    releases.write_text(f"{workshop.wheel('0.5.21', shop)}\n{releases.read_text()}")
    assert main(["refresh", str(tree)]) == 1
    assert "'+' lines use os, which nothing in shop.py binds" in capsys.readouterr().out
