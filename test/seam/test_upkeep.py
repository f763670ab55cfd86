# SPDX-License-Identifier: Apache-2.0
"""`seam drift`, `seam annotate` and `seam release`: what changed, whose it is, what is left."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from workshop import MESSAGE, Workshop, git

from seam.cli import main
from seam.series import Series
from seam.wheels import is_cached

ROOT = Path(__file__).resolve().parents[2]
SHOP = "python/sglang/srt/shop.py"
OLD_SHOP = """\
import os

from sglang.srt import till


class Shop:
    def sell(self, item, price):
        till.open(item)
        self.total = self.total + price
        return till.close(item)


def elsewhere():
    return 1
"""


def supported(workshop: Workshop, release: str, files: dict[str, str]) -> None:
    """Add an older release to the supported ones."""
    toml = workshop.root / "series/releases.toml"
    toml.write_text(f"{workshop.wheel(release, files)}\n{toml.read_text()}")


# drift -------------------------------------------------------------------------------------------


def test_drift_shows_the_touched_scopes_that_changed_and_no_others(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    supported(workshop, "0.5.21", {"sglang/srt/shop.py": OLD_SHOP})
    assert main(["drift", "0.5.21", "0.5.22"]) == 0
    told = capsys.readouterr().out
    assert told == (
        "count-sales: shop.py Shop.sell  +1 -0\n"
        "@@ -7,4 +7,5 @@\n"
        "     def sell(self, item, price):\n"
        "+        # a sale\n"
        "         till.open(item)\n"
        "         self.total = self.total + price\n"
        "         return till.close(item)\n\n"
        "round-total: shop.py Shop.sell  +1 -0  (printed above, under count-sales)\n\n"
    )
    assert main(["drift", "0.5.21", "0.5.22", "close-till"]) == 0
    assert capsys.readouterr().out == (
        "nothing that the patches touch changed from 0.5.21 to 0.5.22\n"
    )


def test_drift_follows_a_scope_to_its_other_name(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"sglang/srt/drawer.py": "def shut(item):\n    return item\n"}
    supported(workshop, "0.5.21", files)
    workshop.write(
        "series/close-till.seam",
        MESSAGE + "+++ old.py | drawer.py\n@@ gone\n+ assert item\n@@ or shut\n+ assert item\n",
    )
    assert main(["drift", "0.5.21", "0.5.22", "close-till"]) == 0
    assert "close-till: drawer.py shut -> old.py gone  +1 -1" in capsys.readouterr().out
    assert main(["drift", "0.5.22", "0.5.23", "close-till"]) == 0
    assert "close-till: old.py gone: gone, 2 lines" in capsys.readouterr().out


def test_drift_of_unknown_names_is_one_clear_error(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drift", "0.5.22", "0.6"]) == 1
    assert "unknown release '0.6'" in capsys.readouterr().err
    assert main(["drift", "0.5.22", "0.5.23", "none"]) == 1
    assert "unknown patch 'none'" in capsys.readouterr().err


def test_drift_of_real_releases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    if not all(is_cached(Series.load(ROOT).release(name)) for name in ("0.5.22", "0.5.23")):
        pytest.skip("the wheels are not in the cache")
    assert main(["drift", "0.5.22", "0.5.23", "metadata-slots", "cpu-pd"]) == 0
    told = capsys.readouterr().out
    assert "DecodeTransferQueue.pop_transferred  +29 -27\n" in told
    assert "SchedulerDisaggregationPrefillMixin._send_kv_chunk  +" in told
    assert "CommonKVManager" not in told


# annotate ----------------------------------------------------------------------------------------


def test_annotate_names_patch_and_hunk_of_every_line_of_ours(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = workshop.folder / "tree"
    assert main(["tree", str(tree)]) == 0
    capsys.readouterr()
    assert main(["annotate", str(tree / SHOP)]) == 0
    assert capsys.readouterr().out == (
        "4: count-sales series/count-sales.seam:16\n"
        "    from sglang.srt import sales\n"
        "11: count-sales series/count-sales.seam:20\n"
        "    sales.count(item)\n"
        "12: round-total series/round-total.seam:16\n"
        "    self.total = round(self.total + price, 2)\n"
    )
    assert main(["annotate", f"{tree / SHOP}:12"]) == 0
    assert capsys.readouterr().out.startswith("12: round-total series/round-total.seam:16\n")
    assert main(["annotate", f"{tree / SHOP}:1"]) == 0
    assert capsys.readouterr().out == "1: not of the series\n    import os\n"
    assert main(["annotate", str(tree / "python/sglang/srt/sales.py")]) == 0
    assert capsys.readouterr().out == "1-2: count-sales (a file that it adds)\n"


def test_annotate_tells_lines_of_a_branch_and_edits(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = workshop.checkout()
    assert main(["am", str(checkout), "--branch", "ours"]) == 0
    git(checkout, "checkout", "--quiet", "ours")
    shop = checkout / SHOP
    shop.write_text("# of the fork\n" + shop.read_text())
    git(checkout, "commit", "--quiet", "--all", "--message=fork")
    shop.write_text("# an edit\n" + shop.read_text())
    capsys.readouterr()
    assert main(["annotate", f"{shop}:14"]) == 0
    assert capsys.readouterr().out.startswith("14: round-total series/round-total.seam:16\n")
    assert main(["annotate", f"{shop}:1"]) == 0
    assert capsys.readouterr().out.startswith("1: not of the series (edited, in no commit yet)")
    seam = workshop.root / "series/round-total.seam"
    seam.write_text(seam.read_text().replace("price, 2)", "price, 3)"))
    assert main(["annotate", f"{shop}:14"]) == 0
    assert "round-total (its seam file reads otherwise now)" in capsys.readouterr().out


def test_annotate_of_what_git_does_not_know_is_one_clear_error(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(file: object) -> str:
        assert main(["annotate", str(file)]) == 1
        return capsys.readouterr().err

    checkout = workshop.checkout()
    assert "is not a file" in refused(checkout / "none.py")
    assert "in no git repository, or not tracked" in refused(
        workshop.root / SHOP.replace("shop", "sales")
    )
    assert "has only 11 lines" in refused(f"{checkout / SHOP}:99")


# release -----------------------------------------------------------------------------------------


def without_newest(root: Path) -> str:
    """Take the newest release out of releases.toml; the whole text as it was."""
    toml = root / "series/releases.toml"
    text = toml.read_text()
    toml.write_text(text[: text.rindex("[[release]]")].rstrip("\n") + "\n")
    return text


def test_real_release_is_added_as_it_stands_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = Series.load(ROOT).newest
    if not is_cached(newest):
        pytest.skip("the wheel is not in the cache")
    for part in ("series", "python", "test/registered", "src/seam"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, tmp_path / part, ignore=ignored)
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    text = without_newest(tmp_path)
    assert main(["release", newest.name]) == 0
    assert (tmp_path / "series/releases.toml").read_text() == text
    told = capsys.readouterr().out
    for mark in ("[x] listed", "[x] fits", "[?] read", "[?] test", "[x] noted"):
        assert mark in told
    assert "seam drift 0.5.22 0.5.23 metadata-slots" in told


def metadata(*requires: str) -> dict[str, str]:
    """The metadata of a wheel of the tiny sglang."""
    lines = ["Metadata-Version: 2.1", "Name: sglang", "Version: 0.5.24", "Requires-Python: >=3.10"]
    lines += [f"Requires-Dist: {one}" for one in requires]
    return {"sglang-0.5.24.dist-info/METADATA": "\n".join(lines) + "\n"}


def test_release_is_walked_through_until_nothing_is_left(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"sglang/srt/till.py": "def shut(item):\n    return item\n"}
    workshop.wheel("0.5.24", {**broken, **metadata("transformers==5.20.0", "torch==2.15")})
    assert main(["release", "0.5.24"]) == 1
    told = capsys.readouterr().out
    assert "written  series/releases.toml" in told and "[x] listed  2026-10-30" in told
    assert "[ ] fits    not close-till: mend their seams" in told
    assert "close-till.seam:13 on 0.5.24: no-scope" in told
    assert "[?] read    1 touched scopes changed since 0.5.23" in told
    assert "seam drift 0.5.23 0.5.24 close-till  # 1" in told
    assert "[ ] noted   README.md and CHANGELOG.md must name it" in told
    release = Series.load().release("0.5.24")
    assert (release.pins, release.torch) == (("transformers==5.20.0",), "2.15")
    seam = workshop.root / "series/close-till.seam"
    seam.write_text(seam.read_text() + "@@ or shut\n+ assert item\n")
    for name in ("README.md", "CHANGELOG.md"):
        workshop.write(name, "to 0.5.24.\n")
    assert main(["release", "0.5.24"]) == 0
    assert "written" not in capsys.readouterr().out


def test_older_release_is_put_where_it_belongs(workshop: Workshop) -> None:
    text = (workshop.root / "series/releases.toml").read_text()
    workshop.wheel("0.5.22.post1", metadata("transformers>=5.20"))
    main(["release", "0.5.22.post1"])
    after = (workshop.root / "series/releases.toml").read_text()
    assert list(Series.load().releases) == ["0.5.22", "0.5.22.post1", "0.5.23"]
    assert after.index('"0.5.22.post1"') < after.index('"0.5.23"')
    assert all(line in after for line in text.splitlines())


def test_pin_that_is_out_of_range_is_told(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    workshop.wheel("0.5.24", metadata("transformers>=6", "torch==2.*"))
    main(["release", "0.5.24"])
    told = capsys.readouterr().out
    assert "transformers: it wants >=6, 5.19.0 was taken over: choose one" in told


def test_release_that_cannot_be_had_writes_nothing(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (workshop.root / "series/releases.toml").read_bytes()

    def refused(version: str) -> str:
        assert main(["release", version]) == 1
        assert (workshop.root / "series/releases.toml").read_bytes() == before
        return capsys.readouterr().err

    assert "'newest' is no version" in refused("newest")
    (workshop.cache / "sglang-0.5.24-py3-none-any.whl").write_text("no archive")
    assert "is not a wheel of SGLang" in refused("0.5.24")
    (workshop.cache / "sglang-0.5.24-cp311-cp311-linux_x86_64.whl").write_text("")
    assert "has several wheels of 0.5.24; leave one there" in refused("0.5.24")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert "pip could not fetch sglang 0.5.25" in refused("0.5.25")
