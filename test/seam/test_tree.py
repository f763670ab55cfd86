# SPDX-License-Identifier: Apache-2.0
"""`seam tree` builds a whole package, patched, or nothing; `seam status` tells what it carries."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from workshop import FILES, Workshop, git

from seam import tree
from seam.cli import main


@pytest.fixture
def target(workshop: Workshop) -> Path:
    """Where trees are built."""
    return workshop.folder / "built" / "tree"


def leftovers(target: Path) -> list[str]:
    """What stands beside the target."""
    return [path.name for path in target.parent.iterdir() if path != target]


def test_tree_is_the_whole_package_patched_as_clean_commits(
    workshop: Workshop, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tree", str(target)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"PYTHONPATH={target}/python"
    for path, text in FILES.items():
        if "/shop" not in path and "/till" not in path:
            assert (target / "python" / path).read_text() == text
    assert "round(" in (target / "python/sglang/srt/shop.py").read_text()
    assert (target / "test/registered/unit/test_sales.py").exists()
    assert git(target, "status", "--porcelain") == ""
    log = git(target, "log", "--format=%(trailers:key=Seam,valueonly)%s")
    assert log.split("\n")[-1].startswith("sglang 0.5.23 (wheel sha256 ")
    assert git(target, "rev-list", "--count", "HEAD") == "4"
    assert leftovers(target) == []


def test_compiled_files_are_in_the_tree_but_not_in_git(workshop: Workshop, target: Path) -> None:
    assert main(["tree", str(target)]) == 0
    (target / "python/sglang/srt/__pycache__").mkdir()
    (target / "python/sglang/srt/__pycache__/shop.cpython-311.pyc").write_text("")
    assert ".so" not in git(target, "ls-files")
    assert git(target, "status", "--porcelain") == ""


def test_executable_files_stay_so(workshop: Workshop, target: Path) -> None:
    assert main(["tree", str(target)]) == 0
    assert os.access(target / "python/sglang/tool.sh", os.X_OK)
    assert git(target, "ls-files", "--stage", "python/sglang/tool.sh").startswith("100755")


def test_same_input_gives_the_same_tree(workshop: Workshop, target: Path) -> None:
    other = target.parent / "other"
    assert main(["tree", str(target)]) == 0
    assert main(["tree", str(other)]) == 0
    assert git(target, "rev-parse", "HEAD") == git(other, "rev-parse", "HEAD")


def test_release_and_patches_can_be_chosen(
    workshop: Workshop, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tree", str(target), "--release", "0.5.22", "close-till"]) == 0
    assert git(target, "rev-list", "--count", "HEAD") == "2"
    assert main(["status", str(target)]) == 0
    assert "sglang 0.5.22, 1 patch of the series" in capsys.readouterr().out


def test_patch_left_out_takes_those_that_need_it(
    workshop: Workshop, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tree", str(target), "--without", "count-sales"]) == 0
    assert "also left out, because they need what is: round-total" in capsys.readouterr().out
    assert git(target, "rev-list", "--count", "HEAD") == "2"
    assert main(["tree", str(target.parent / "b"), "round-total", "--without", "count-sales"]) == 1
    assert "round-total cannot be laid without count-sales" in capsys.readouterr().err


def test_replace_builds_anew_only_what_differs(
    workshop: Workshop, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tree", str(target)]) == 0
    assert main(["tree", str(target)]) == 1
    assert "--replace builds it anew" in capsys.readouterr().err
    assert main(["tree", str(target), "--replace"]) == 0
    assert "is so already" in capsys.readouterr().out
    assert main(["tree", str(target), "--replace", "--without", "close-till"]) == 0
    assert git(target, "rev-list", "--count", "HEAD") == "3"
    assert leftovers(target) == []


def edit(target: Path) -> None:
    shop = target / "python/sglang/srt/shop.py"
    shop.write_text(shop.read_text() + "# an edit\n")


def edit_and_commit(target: Path) -> None:
    edit(target)
    git(target, "commit", "--quiet", "--all", "--message=mine")


def edit_and_stash(target: Path) -> None:
    edit(target)
    git(target, "stash")


def commit_elsewhere(target: Path) -> None:
    git(target, "checkout", "--quiet", "-b", "mine")
    edit_and_commit(target)
    git(target, "checkout", "--quiet", tree.BRANCH)


def add_a_file(target: Path) -> None:
    (target / "notes.txt").write_text("mine\n")


@pytest.mark.parametrize(
    "change", [edit, edit_and_commit, edit_and_stash, commit_elsewhere, add_a_file]
)
def test_replace_loses_nothing_of_the_users(
    workshop: Workshop,
    target: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None],
) -> None:
    assert main(["tree", str(target)]) == 0
    change(target)
    before = git(target, "for-each-ref"), git(target, "status", "--porcelain")
    assert main(["tree", str(target), "--replace", "--without", "close-till"]) == 1
    told = capsys.readouterr().err
    assert "was edited since it was built" in told or "has files of yours: notes.txt" in told
    assert before == (git(target, "for-each-ref"), git(target, "status", "--porcelain"))


def test_targets_that_cannot_be_built_at_are_refused(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*args: str) -> str:
        assert main(["tree", *args]) == 1
        return capsys.readouterr().err

    full, file = workshop.folder / "full", workshop.folder / "file"
    full.mkdir()
    (full / "something").write_text("")
    file.write_text("")
    assert "is not empty" in refused(str(full))
    assert "is not empty" in refused(str(full), "--replace")
    assert "is not a folder" in refused(str(file))
    assert f"{file} is not a folder" in refused(str(file / "tree"))
    assert "unknown release '0.5'" in refused(str(full), "--release", "0.5")
    assert "unknown patch 'none'" in refused(str(full), "none")
    empty = workshop.folder / "empty"
    empty.mkdir()
    assert main(["tree", str(empty)]) == 0


def test_unwritable_target_is_refused(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    # Not even root can write there.
    assert main(["tree", "/proc/tree"]) == 1
    assert capsys.readouterr().err.startswith("seam: cannot build at /proc/tree: ")


def test_failure_while_writing_leaves_nothing(
    workshop: Workshop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.parent.mkdir()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tree, "_write_file", full)
    assert main(["tree", str(target)]) == 1
    assert list(target.parent.iterdir()) == []


def test_series_that_does_not_fit_builds_nothing(
    workshop: Workshop, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seam = workshop.root / "series/close-till.seam"
    seam.write_text(seam.read_text().replace("@@ close", "@@ lock"))
    assert main(["tree", str(target)]) == 1
    assert "close-till.seam:13 on 0.5.23: no-scope" in capsys.readouterr().err
    assert not target.exists()


def test_ended_command_leaves_nothing(workshop: Workshop, target: Path) -> None:
    target.parent.mkdir()
    slow = (
        "import time, sys; from seam import cli, tree; write = tree._write_file\n"
        "def slowly(*args):\n    write(*args); time.sleep(60)\n"
        "tree._write_file = slowly; sys.exit(cli.main(['tree', sys.argv[1]]))"
    )
    with subprocess.Popen([sys.executable, "-c", slow, str(target)]) as process:
        while not list(target.parent.glob(".tree.*/tree/python/sglang/*")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
    assert list(target.parent.iterdir()) == []


# from an installed package ------------------------------------------------------------------------


@pytest.fixture
def site(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of this interpreter in which the tiny sglang is installed."""
    folder = workshop.folder / "site"
    rows = ["sglang-0.5.23.dist-info/RECORD,,", "sglang/__pycache__/x.pyc,,"]
    version = '__version__ = version = "0.5.23"\n'
    for path, text in {**FILES, "sglang/_version.py": version}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        rows.append(f"{path},sha256={digest.decode()},{len(text)}")
    (folder / "sglang/tool.sh").chmod(0o755)
    info = folder / "sglang-0.5.23.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_installed_package_gives_the_same_tree_as_its_wheel(
    workshop: Workshop, site: Path, target: Path
) -> None:
    assert main(["tree", str(target), "--from", "sglang"]) == 0
    assert main(["tree", str(target.parent / "wheel")]) == 0
    trees = [
        git(folder, "rev-parse", "HEAD^{tree}") for folder in (target, target.parent / "wheel")
    ]
    assert trees[0] == trees[1]
    assert "installed, verified against its RECORD" in git(target, "log", "--format=%s")


def test_installed_package_that_was_changed_is_refused_by_file(
    workshop: Workshop, site: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "sglang/srt/till.py").write_text("changed\n")
    (site / "sglang/srt/shop.py").unlink()
    assert main(["tree", str(target), "--from", "sglang"]) == 1
    told = capsys.readouterr().err
    assert "sglang/srt/till.py" in told and "sglang/srt/shop.py" in told
    assert "install it again" in told and not target.exists()


def test_package_that_is_not_there_or_not_supported_is_refused(
    workshop: Workshop, site: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tree", str(target), "--from", "no-such-package"]) == 1
    assert "no package 'no-such-package'" in capsys.readouterr().err
    assert main(["tree", str(target), "--from", "pytest"]) == 1
    assert "seam am CHECKOUT" in capsys.readouterr().err
    (site / "sglang-0.5.23.dist-info/METADATA").write_text("Name: sglang\nVersion: 0.4.1\n")
    assert main(["tree", str(target), "--from", "sglang"]) == 1
    assert "unknown release '0.4.1'; supported are: 0.5.22, 0.5.23" in capsys.readouterr().err


# status ------------------------------------------------------------------------------------------


def test_status_tells_stock_patched_and_changed(
    workshop: Workshop, site: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tree", str(target)]) == 0
    capsys.readouterr()
    assert main(["status"]) == 0
    assert f"{site}: sglang 0.5.23, stock" in capsys.readouterr().out
    assert main(["status", str(target)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"{target}/python: sglang 0.5.23, 3 patches of the series"
    assert told[1:4] == [
        f"ok       {name}: area: what it does"
        for name in ("close-till", "count-sales", "round-total")
    ]
    till = target / "python/sglang/srt/till.py"
    till.write_text(till.read_text().replace("    assert item\n", ""))
    assert main(["status", str(target / "python")]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[1] == "changed  close-till: area: what it does"
    assert told[2].endswith("python/sglang/srt/till.py: 0 of 1 left: assert item")


def test_status_tells_a_patch_that_was_made_for_another_release(
    workshop: Workshop, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tree", str(target), "--release", "0.5.22"]) == 0
    version = target / "python/sglang/_version.py"
    version.write_text(version.read_text().replace("0.5.22", "0.5.23"))
    assert main(["status", str(target)]) == 1
    assert "(made for 0.5.22)" in capsys.readouterr().out


def test_status_of_nothing_is_refused(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(workshop.folder)]) == 1
    assert "there is no SGLang in" in capsys.readouterr().err


def test_status_does_not_run_a_stamp(
    workshop: Workshop, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tree", str(target)]) == 0
    file = target / "python/sglang/srt/pd_series/stamps/close_till.py"
    file.write_text("raise SystemExit('run')\n")
    assert main(["status", str(target)]) == 1
    assert "not a stamp that seam wrote" in capsys.readouterr().err


def test_status_of_a_tree_tells_what_it_was_built_from_and_edits(
    workshop: Workshop, site: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tree", str(target), "--from", "sglang"]) == 0
    assert main(["status", str(target)]) == 0
    told = capsys.readouterr().out
    assert "built from sglang 0.5.23 (installed, verified against its RECORD)" in told
    assert f" at {sys.executable}" in told
    (target / "python/sglang/tool.sh").write_text("edited\n")
    assert main(["status", str(target)]) == 1
    assert "edited   python/sglang/tool.sh" in capsys.readouterr().out
    assert main(["status", "--json", str(target)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False and told["changed"] == ["python/sglang/tool.sh"]
    assert [one["name"] for one in told["patches"]] == ["close-till", "count-sales", "round-total"]


def test_status_tells_a_wheel_that_was_changed_or_exchanged(
    workshop: Workshop, site: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tree", str(target), "--from", "sglang"]) == 0
    assert main(["status"]) == 0
    (site / "sglang/srt/till.py").write_text("changed\n")
    assert main(["status"]) == 1
    assert "edited   python/sglang/srt/till.py" in capsys.readouterr().out
    (site / "sglang-0.5.23.dist-info/METADATA").write_text("Name: sglang\nVersion: 0.5.24\n")
    assert main(["status", str(target)]) == 1
    assert "the tree is 0.5.23, but 0.5.24 is installed now" in capsys.readouterr().out
