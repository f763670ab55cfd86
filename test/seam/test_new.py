# SPDX-License-Identifier: Apache-2.0
"""`seam new` begins a patch, and anchors are proposed for what was edited of upstream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from workshop import PATH, Shelf, Workshop, git

from seam.changes import changes
from seam.cli import main
from seam.drift import Sources
from seam.propose import Proposal, propose
from seam.series import Series
from seam.source import Source

SHOP = "python/sglang/srt/shop.py"
SALES = "python/sglang/srt/sales.py"

CODE = '''\
import os


class Shop:
    """Sells."""

    def sell(self, item, price):
        """Sell."""
        # a sale
        self.till.open(item, drawer=1)
        self.total = self.total + price
        for one in self.items:
            if one > 1 and price:
                one.note()
        return self.till.close(item)
'''
OLDER = CODE.replace("open(item, drawer=1)", "open(item)").replace(
    "self.total + price", "price + self.total"
)


def proposals(workshop: Workshop, old: str, new: str, older: str = OLDER) -> list[tuple[int, str]]:
    """How many releases each hunk fits that turns CODE with `old` into CODE with `new`."""
    assert old in CODE
    before, after = Source(CODE.encode(), PATH), Source(CODE.replace(old, new).encode(), PATH)
    releases = Series.load().releases.values()
    sources = [
        (one.name, Sources(one, Shelf({PATH: text})))
        for one, text in zip(releases, (older, CODE), strict=True)
    ]
    found: list[Proposal] = []
    for change in changes(before, after):
        found += propose(change, before, after, before, PATH, sources)
    return [(len(one.releases), one.hunk.rstrip()) for one in found]


@pytest.mark.parametrize(
    ("old", "new", "hunk"),
    [
        (
            "self.till.open(item, drawer=1)",
            "ours.open(self.till, item, drawer=1)",
            "@@ Shop.sell\n- self.till.open($*rest)\n+ ours.open(self.till, $*rest)",
        ),
        (
            "self.till.close(item)",
            "ours.close(item)",
            "@@ Shop.sell\n- self.till.close($item)\n+ ours.close($item)",
        ),
        (
            "self.total = self.total + price",
            "self.total = ours.total(self.total + price)",
            "@@ Shop.sell\n- self.total = $value\n+ self.total = ours.total($value)",
        ),
        (
            "        self.total = self",
            "        ours.count(item)\n        self.total = self",
            "@@ Shop.sell\n+ ours.count(item)\n  self.total = $_",
        ),
        (
            "        # a sale\n",
            "        ours.begin(self)\n        # a sale\n",
            "@@ Shop.sell\n+ ours.begin(self)",
        ),
        ("    def sell", "    @ours.sells\n    def sell", "@@ Shop.sell\n+ @ours.sells"),
        ("import os\n", "import os\nimport ours\n", "@@ import\n+ import ours"),
        (
            "if one > 1 and price:",
            "if ours.asks(one) and one > 1 and price:",
            "@@ Shop.sell\n- one > 1 and price\n+ ours.asks(one) and one > 1 and price",
        ),
        (
            "                one.note()\n",
            "                one.note()\n                ours.note(one)\n",
            "@@ Shop.sell\n  one.note()\n+ ours.note(one)",
        ),
        (
            "        return self.till.close(item)",
            "        with ours:\n            return self.till.close(item)",
            "@@ Shop.sell\n- return self.till.close(item)\n+ with ours:\n"
            "+     return self.till.close(item)",
        ),
        (
            "                one.note()\n",
            "                pass\n",
            "@@ Shop.sell\n- one.note()\n+ pass",
        ),
    ],
)
def test_best_anchor_is_the_one_that_fits_both_releases(
    workshop: Workshop, old: str, new: str, hunk: str
) -> None:
    ranked = proposals(workshop, old, new)
    assert (2, hunk) in ranked
    counts = [count for count, _ in ranked]
    assert counts == sorted(counts, reverse=True)
    top = [one for count, one in ranked if count == 2]
    assert hunk in top[:3], top


def test_anchor_that_an_older_release_lacks_comes_later(workshop: Workshop) -> None:
    ranked = proposals(
        workshop, "self.till.open(item, drawer=1)", "ours.open(self.till, item, drawer=1)"
    )
    assert ranked[0][0] == 2 and ranked[-1][0] == 1
    assert "- self.till.open(item, drawer=1)" in ranked[-1][1]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("import os\n", "import os\nLIMIT = 1\n", "top level of a module can only import"),
        ("def sell(self, item, price)", "def sell(self, item, price, x)", "head of a definition"),
        (
            "        self.till.open(item, drawer=1)\n        self.total = self.total + price\n",
            "        ours.all(self)\n",
            "replaces several by another number",
        ),
    ],
)
def test_change_that_no_seam_can_make_says_why(old: str, new: str, fault: str) -> None:
    before, after = Source(CODE.encode(), PATH), Source(CODE.replace(old, new).encode(), PATH)
    (change,) = changes(before, after)
    assert fault in change.fault


def test_layout_and_comments_are_no_change() -> None:
    text = CODE.replace("item, drawer=1", "\n            item,\n            drawer=1,  # why\n")
    assert changes(Source(CODE.encode(), PATH), Source(text.encode(), PATH)) == []


# the command -------------------------------------------------------------------------------------


@pytest.fixture
def tree(workshop: Workshop) -> Path:
    """A built tree of the newest release."""
    folder = workshop.folder / "tree"
    assert main(["tree", str(folder)]) == 0
    return folder


def test_skeleton_is_a_patch_that_waits_to_be_filled_in(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "give-change"]) == 0
    capsys.readouterr()
    assert main(["check", "0.5.23"]) == 1
    told = capsys.readouterr().out
    assert "give-change  x" in told
    for what in ("the subject", "why", "Directive", "Upstream", "Tested", "Rejected"):
        assert f": fill in {what}\n" in told
    seam = workshop.root / "series/give-change.seam"
    lines = seam.read_text().splitlines()
    filled = [
        "area: another"
        if number == 0
        else f"{line} really"
        if number == 2 or (": " in line and not line.startswith(("Confidence", "Scope-risk")))
        else line
        for number, line in enumerate(lines)
    ]
    seam.write_text("\n".join(filled) + "\n")
    assert main(["check", "0.5.23"]) == 0
    test = workshop.root / "test/registered/unit/disaggregation/test_give_change.py"
    assert "register_cpu_ci(est_time=5" in test.read_text()
    compile(test.read_text(), str(test), "exec")


def test_edits_of_upstream_become_a_patch(
    workshop: Workshop, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shop = tree / SHOP
    text = shop.read_text().replace("return till.close(item)", "return tally.close(till, item)")
    text = text.replace("import till\n", "import till\nfrom sglang.srt import tally\n", 1)
    shop.write_text(text)
    (tree / "python/sglang/srt/tally.py").write_text("def close(till, item): ...\n")
    capsys.readouterr()
    assert main(["refresh", str(tree)]) == 1
    told = capsys.readouterr().err
    assert "tally.py is new: write 'adds python" in told
    assert main(["new", "tally-up", "--from", str(tree)]) == 0
    assert (workshop.root / "series/tally-up.seam").read_text().partition("---\n")[2] == (
        "adds python/sglang/srt/tally.py\n\n+++ shop.py\n@@ import\n"
        "+ from sglang.srt import tally\n\n@@ Shop.sell\n- till.close($item)\n"
        "+ tally.close(till, $item)\n"
    )
    assert (workshop.root / "python/sglang/srt/tally.py").is_file()
    assert Series.load().patches[-1].name == "tally-up"
    assert git(tree, "log", "-1", "--format=%(trailers:key=Seam,valueonly)") == "tally-up"
    assert main(["refresh", str(tree)]) == 0


def test_edits_of_our_lines_stay_for_refresh(workshop: Workshop, tree: Path) -> None:
    shop = tree / SHOP
    shop.write_text(
        shop.read_text()
        .replace("sales.count(item)", "sales.count(item, 1)")
        .replace("return till.close(item)", "return till.close(item, 1)")
    )
    (tree / SALES).write_text("def count(item, much): ...\n")
    assert main(["new", "close-more", "--from", str(tree)]) == 0
    assert "count" not in (workshop.root / "series/close-more.seam").read_text()
    assert sorted(git(tree, "diff", "--name-only").splitlines()) == [SALES, SHOP]
    assert main(["refresh", str(tree)]) == 1  # its message is still to be filled in
    assert "+ sales.count(item, 1)" in (workshop.root / "series/count-sales.seam").read_text()
    assert git(tree, "status", "--porcelain") == ""


def test_patch_is_for_the_releases_that_its_anchors_fit(workshop: Workshop) -> None:
    till = {"sglang/srt/till.py": "def close(item):\n    return [item]\n"}
    releases = workshop.root / "series/releases.toml"
    releases.write_text(f"{workshop.wheel('0.5.21', till)}\n{releases.read_text()}")
    tree = workshop.folder / "tree"
    assert main(["tree", str(tree)]) == 0
    file = tree / "python/sglang/srt/till.py"
    file.write_text(file.read_text().replace("return item", "return item + 1"))
    assert main(["new", "add-one", "--from", str(tree)]) == 0
    seam = (workshop.root / "series/add-one.seam").read_text()
    assert "releases: 0.5.22 ..\n" in seam and "- return item\n+ return item + 1" in seam


def test_nothing_is_written_when_a_patch_cannot_begin(
    workshop: Workshop, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*args: str) -> str:
        before = sorted(workshop.root.rglob("*")), (workshop.root / "series/series").read_bytes()
        capsys.readouterr()
        assert main(["new", *args]) == 1
        after = sorted(workshop.root.rglob("*")), (workshop.root / "series/series").read_bytes()
        assert before == after
        return capsys.readouterr().err

    assert "'Up' is no name of a patch" in refused("Up")
    assert "there is a series/close-till.seam already" in refused("close-till")
    assert "has no edit of upstream's lines" in refused("up", "--from", str(tree))
    assert "is not a folder" in refused("up", "--from", str(workshop.folder / "none"))
    shop = tree / SHOP
    shop.write_text(shop.read_text().replace("def sell(self,", "def sell(this,"))
    assert "a seam does not change the head of a definition" in refused("up", "--from", str(tree))
    shop.write_text("def (:\n")
    assert "not Python" in refused("up", "--from", str(tree))


def test_installed_series_is_not_written_to(workshop: Workshop) -> None:
    code = (
        "import seam.series, seam.cli, pathlib; seam.series.PACKAGED = pathlib.Path.cwd();"
        "raise SystemExit(seam.cli.main(['new', 'up']))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=workshop.root, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1 and "is an installed series; run this in a clone" in run.stderr
