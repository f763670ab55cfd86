# SPDX-License-Identifier: Apache-2.0
"""`seam am` writes one commit per patch and touches nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from workshop import SEAMS, Workshop, git

from seam.cli import main


def branch(checkout: Path) -> str:
    """The branch that `am` made."""
    return git(checkout, "branch", "--list", "pd-series/*", "--format=%(refname:short)")


def test_one_commit_per_patch_with_its_message(workshop: Workshop) -> None:
    checkout = workshop.checkout()
    assert main(["am", str(checkout)]) == 0
    log = git(checkout, "log", "--reverse", "--format=%(trailers:key=Seam,valueonly)", "main..HEAD")
    assert log == ""
    made = branch(checkout)
    log = git(checkout, "log", "--reverse", "--format=%(trailers:key=Seam,valueonly)", made)
    assert log.split() == ["count-sales", "round-total", "close-till"]
    body = git(checkout, "log", "-1", "--format=%B", made)
    assert body.startswith("area: what it does\n\nWhy it is done.\n\nConfidence: high\n")
    changed = git(checkout, "show", "--name-only", "--format=", f"{made}~2")
    assert changed.split() == [
        "python/sglang/srt/pd_series/stamps/count_sales.py",
        "python/sglang/srt/sales.py",
        "python/sglang/srt/shop.py",
        "test/registered/unit/test_sales.py",
    ]


def test_index_work_tree_and_branches_stay_as_they_are(workshop: Workshop) -> None:
    checkout = workshop.checkout()
    shop = checkout / "python/sglang/srt/shop.py"
    shop.write_text("my own edit\n")
    (checkout / "python/sglang/srt/till.py").unlink()
    git(checkout, "add", "python/sglang/srt/till.py")
    before = (git(checkout, "status", "--porcelain"), git(checkout, "rev-parse", "HEAD"))
    assert main(["am", str(checkout), "--branch", "ours"]) == 0
    assert (git(checkout, "status", "--porcelain"), git(checkout, "rev-parse", "HEAD")) == before
    assert shop.read_text() == "my own edit\n"
    assert "round(" in git(checkout, "show", "ours:python/sglang/srt/shop.py")


def test_same_input_gives_the_same_hashes(workshop: Workshop) -> None:
    checkout = workshop.checkout()
    for name in ("one", "two"):
        assert main(["am", str(checkout), "--branch", name]) == 0
    assert git(checkout, "rev-parse", "one") == git(checkout, "rev-parse", "two")


def test_single_patch_brings_what_it_needs(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = workshop.checkout()
    assert main(["am", str(checkout), "round-total"]) == 0
    assert "also laid, because others need them: count-sales" in capsys.readouterr().out
    assert git(checkout, "rev-list", "--count", branch(checkout)) == "3"


def test_local_commits_and_file_modes_are_kept(workshop: Workshop) -> None:
    checkout = workshop.checkout()
    shop = checkout / "python/sglang/srt/shop.py"
    shop.write_text(shop.read_text().replace("# a sale", "# our own remark"))
    shop.chmod(0o755)
    git(checkout, "commit", "--quiet", "--all", "--message=local")
    assert main(["am", str(checkout), "--onto", "main", "--branch", "ours"]) == 0
    assert "# our own remark" in git(checkout, "show", "ours:python/sglang/srt/shop.py")
    listed = git(checkout, "ls-tree", "ours", "python/sglang/srt/shop.py")
    assert listed.startswith("100755 ")


def test_commits_can_be_picked_and_reverted_alone(workshop: Workshop) -> None:
    checkout = workshop.checkout()
    assert main(["am", str(checkout), "--branch", "ours"]) == 0
    git(checkout, "checkout", "--quiet", "-b", "release")
    git(checkout, "cherry-pick", "ours")
    assert "assert item" in git(checkout, "show", "HEAD:python/sglang/srt/till.py")
    git(checkout, "revert", "--no-edit", "HEAD")
    assert git(checkout, "diff", "main", "HEAD") == ""
    assert main(["am", str(checkout), "close-till", "--branch", "again"]) == 0


def test_patches_that_are_there_are_refused_and_others_are_laid(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = workshop.checkout()
    assert main(["am", str(checkout), "count-sales", "--branch", "one"]) == 0
    capsys.readouterr()
    assert main(["am", str(checkout), "--onto", "one", "--branch", "two"]) == 1
    assert "carries already: count-sales; name the patches" in capsys.readouterr().err
    assert main(["am", str(checkout), "round-total", "--onto", "one", "--branch", "two"]) == 0
    assert git(checkout, "rev-list", "--count", "one..two") == "1"
    assert "also laid" not in capsys.readouterr().out


def test_patch_that_is_there_without_a_stamp_is_present(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = workshop.checkout()
    till = checkout / "python/sglang/srt/till.py"
    till.write_text("def close(item):\n    assert item\n    return item\n")
    git(checkout, "commit", "--quiet", "--all", "--message=by hand")
    assert main(["am", str(checkout), "close-till"]) == 0
    told = capsys.readouterr().out
    assert "present" in told and "no branch was made" in told
    assert branch(checkout) == ""


def test_release_is_told_by_the_nearest_tag_or_by_the_user(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = workshop.checkout(release="0.5.22")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message=later")
    assert main(["am", str(checkout), "--branch", "one"]) == 0
    assert "(0.5.22)" in capsys.readouterr().out
    assert main(["am", str(checkout), "--branch", "two", "--release", "0.5.23"]) == 0
    assert 'RELEASE = "0.5.23"' in git(
        checkout, "show", "two:python/sglang/srt/pd_series/stamps/close_till.py"
    )
    git(checkout, "tag", "v0.5.30")
    assert main(["am", str(checkout), "--branch", "three"]) == 0
    assert "0.5.30 is not one of the supported releases" in capsys.readouterr().out


def test_release_that_nothing_tells_is_asked_for(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = workshop.checkout(release=None)
    assert main(["am", str(checkout)]) == 1
    assert "say it: --release R" in capsys.readouterr().err


def test_series_that_does_not_fit_makes_no_branch(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = workshop.checkout()
    till = checkout / "python/sglang/srt/till.py"
    till.write_text("def open(item): ...\n")
    git(checkout, "commit", "--quiet", "--all", "--message=less")
    assert main(["am", str(checkout)]) == 1
    told = capsys.readouterr().err
    assert "nothing was written" in told
    assert "close-till.seam:13 on 0.5.23: no-scope\n  no close in till.py" in told
    assert branch(checkout) == ""


def test_broken_checkouts_are_refused(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: str) -> str:
        assert main(["am", *args]) == 1
        return capsys.readouterr().err

    checkout = workshop.checkout()
    assert "is not a folder" in refused(str(workshop.folder / "nowhere"))
    assert "is not a git checkout" in refused(str(workshop.folder))
    assert "has no commit 'nothing'" in refused(str(checkout), "--onto", "nothing")
    assert "unknown release '0.4'" in refused(str(checkout), "--release", "0.4")
    assert "unknown patch 'none'" in refused(str(checkout), "none")
    assert "not a name that git allows" in refused(str(checkout), "--branch", "a..b")
    assert "there is a branch main already" in refused(str(checkout), "--branch", "main")
    other = workshop.folder / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    git(other, "commit", "--quiet", "--allow-empty", "--message=empty")
    assert "is not SGLang: it has no python/sglang/srt" in refused(str(other))
    monkeypatch.setenv("PATH", "")
    assert "git is not installed" in refused(str(checkout))


def test_environment_of_a_git_hook_does_not_lead_elsewhere(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = workshop.checkout()
    other = workshop.checkout("other")
    shutil.rmtree(other / "python")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert main(["am", str(checkout), "--branch", "ours"]) == 0
    monkeypatch.delenv("GIT_DIR")
    assert git(checkout, "rev-list", "--count", "main..ours") == "3"
    assert git(other, "branch", "--list", "ours") == ""


# an older series ---------------------------------------------------------------------------------


def older(workshop: Workshop) -> Path:
    """A checkout whose branch carries the series, with own commits around and above it."""
    checkout = workshop.checkout()
    own(checkout, "till.py", "def lock(): ...\n")
    assert main(["am", str(checkout), "--branch", "ours"]) == 0
    git(checkout, "checkout", "--quiet", "ours")
    own(checkout, "shop.py", "\n\ndef give(item): ...\n")
    return checkout


def own(checkout: Path, name: str, text: str) -> None:
    file = checkout / "python/sglang/srt" / name
    file.write_text(file.read_text() + text)
    git(checkout, "commit", "--quiet", "--all", f"--message=own {name}")


def renew(workshop: Workshop) -> None:
    """Make a newer series: one patch changed, one gone, one new, a module rewritten."""
    workshop.write_series(
        {
            "count-sales": SEAMS["count-sales"].replace("+ sales.count", "+ sales.add"),
            "close-till": SEAMS["close-till"],
            "open-till": SEAMS["close-till"]
            .replace("@@ close", "@@ open")
            .replace("+ assert item", "+ @callable"),
        }
    )
    (workshop.root / "series/round-total.seam").unlink()
    workshop.write("python/sglang/srt/sales.py", "def add(item):\n    return item\n")


def test_replace_moves_an_older_series_to_a_newer_one(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = older(workshop)
    renew(workshop)
    (checkout / "python/sglang/srt/till.py").write_text("my own edit\n")
    before = git(checkout, "status", "--porcelain")
    capsys.readouterr()
    for name in ("new", "again"):
        assert main(["am", str(checkout), "--replace", "--branch", name]) == 0
    assert git(checkout, "rev-parse", "new") == git(checkout, "rev-parse", "again")
    assert git(checkout, "status", "--porcelain") == before
    told = capsys.readouterr().out
    assert "taken out first: close-till, count-sales, round-total" in told
    log = git(checkout, "log", "--reverse", "--format=%s %(trailers:key=Seam)", "ours..new")
    assert [line.split()[-1] for line in log.splitlines() if line] == [
        "out", "count-sales", "close-till", "open-till",
    ]  # fmt: skip
    shop = git(checkout, "show", "new:python/sglang/srt/shop.py")
    assert "sales.add(item)" in shop and "round(" not in shop and "def give(item)" in shop
    assert "def lock()" in git(checkout, "show", "new:python/sglang/srt/till.py")
    git(checkout, "checkout", "--quiet", "--force", "new")
    assert main(["status", str(checkout)]) == 0


def test_replace_leads_to_what_the_newer_series_alone_gives(workshop: Workshop) -> None:
    checkout = older(workshop)
    renew(workshop)
    assert main(["am", str(checkout), "--replace", "--branch", "new"]) == 0
    git(checkout, "checkout", "--quiet", "-b", "plain", "main")
    own(checkout, "shop.py", "\n\ndef give(item): ...\n")
    assert main(["am", str(checkout), "--branch", "alone"]) == 0
    assert git(checkout, "diff", "new", "alone") == ""


def test_replace_by_the_same_series_does_nothing(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = older(workshop)
    assert main(["am", str(checkout), "--replace", "--branch", "new"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert git(checkout, "branch", "--list", "new") == ""


def test_replace_twice_and_after_a_revert(workshop: Workshop) -> None:
    checkout = older(workshop)
    git(checkout, "revert", "--no-edit", "HEAD~1")
    renew(workshop)
    assert main(["am", str(checkout), "--replace", "--branch", "new"]) == 0
    git(checkout, "checkout", "--quiet", "new")
    workshop.write("python/sglang/srt/sales.py", "def add(item):\n    return 1\n")
    assert main(["am", str(checkout), "--replace", "--branch", "newest"]) == 0
    assert "return 1" in git(checkout, "show", "newest:python/sglang/srt/sales.py")
    assert git(checkout, "diff", "--name-only", "new", "newest") == (
        "python/sglang/srt/pd_series/stamps/count_sales.py\npython/sglang/srt/sales.py"
    )


def test_replace_refuses_what_it_cannot_take_out(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = older(workshop)
    till = checkout / "python/sglang/srt/till.py"
    till.write_text(till.read_text().replace("assert item", "assert item, 2"))
    git(checkout, "commit", "--quiet", "--all", "--message=edit")
    assert main(["am", str(checkout), "--replace", "--branch", "new"]) == 1
    told = capsys.readouterr().err
    assert "till.py was changed where close-till put its lines" in told and "git revert" in told
    git(checkout, "checkout", "--quiet", "-b", "squashed", "main")
    git(checkout, "merge", "--quiet", "--squash", "ours")
    git(checkout, "commit", "--quiet", "--message=squashed")
    assert main(["am", str(checkout), "--replace", "--branch", "new"]) == 1
    assert "were they squashed?" in capsys.readouterr().err
    assert git(checkout, "branch", "--list", "new") == ""
