# SPDX-License-Identifier: Apache-2.0
"""A maintainer's day on real releases: edit a tree, take it back, carry it on release branches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from workshop import git

from seam.cli import main
from seam.series import Series
from seam.wheels import Wheel, is_cached

ROOT = Path(__file__).resolve().parents[2]
NEW, OTHER = "0.5.23", "0.5.22"
SLOTS = "python/sglang/srt/disaggregation/metadata_slots.py"
CHECKER = "python/sglang/srt/managers/scheduler_components/invariant_checker.py"
SCHEDULER = "python/sglang/srt/managers/scheduler.py"
ADMISSION_TEST = "test/registered/unit/disaggregation/test_admission.py"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what of this repository `seam` reads; commands run in it."""
    missing = [one.wheel for one in Series.load(ROOT).releases.values() if not is_cached(one)]
    if missing:
        pytest.skip(f"{missing[0]} is not in the cache; `seam check` fetches it")
    folder = tmp_path / "repository"
    for part in ("series", "python", "test/registered", "src/seam"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(folder)
    return folder


def change(file: Path, old: str, new: str) -> None:
    """Edit a file; what is edited must be there once."""
    text = file.read_text()
    assert text.count(old) == 1, (file, old)
    file.write_text(text.replace(old, new))


def commit_release(checkout: Path, name: str) -> None:
    """A branch of its own with all sources of a release, tagged as SGLang tags it."""
    git(checkout, "checkout", "--quiet", "--orphan", f"release-{name}")
    with Wheel(Series.load(ROOT).release(name)) as wheel:
        for path in wheel.paths():
            if not path.endswith(".so"):
                (checkout / path).parent.mkdir(parents=True, exist_ok=True)
                (checkout / path).write_bytes(wheel.read(path) or b"")
    git(checkout, "add", "--all", "--force")
    git(checkout, "commit", "--quiet", f"--message=sglang {name}")
    git(checkout, "tag", f"v{name}")


@pytest.mark.timeout(1800)
def test_edit_refresh_carry_and_pick(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A built tree is edited: a module of ours and the line that calls it.
    tree = tmp_path / "tree"
    assert main(["tree", str(tree), "--release", NEW]) == 0
    change(tree / SLOTS, "def check_idle(checker: Any)", "def check_idle(checker: Any, when: str)")
    change(tree / CHECKER, "check_idle(self)", 'check_idle(self, when="idle")')

    # It goes back, with the alternative of older releases, and fits all 18.
    capsys.readouterr()
    assert main(["refresh", str(tree)]) == 0
    told = capsys.readouterr().out
    marks = next(line for line in told.splitlines() if line.startswith("metadata-slots"))
    assert len(marks.split()) == 19 and "E" not in marks.split()
    # The README shows the matrix as it is printed, but for a terminal's trailing blanks.
    _, _, below = (ROOT / "README.md").read_text().partition("<!-- make matrix -->\n```text\n")
    matrix = below.partition("```")[0]
    assert matrix and matrix in "".join(f"{line.rstrip()}\n" for line in told.splitlines())
    seam = (repository / "series/metadata-slots.seam").read_text()
    assert seam.count('+ metadata_slots.check_idle(self, when="idle")') == 2
    assert "when: str" in (repository / SLOTS).read_text()
    assert main(["status", str(tree)]) == 0

    # An edit of upstream's line is refused, and anchored elsewhere.
    line = "    def event_loop_normal(self):\n"
    change(tree / SCHEDULER, line, f"    @functools.cache\n{line}")
    before = git(tree, "diff")
    assert main(["refresh", str(tree)]) == 1
    told = capsys.readouterr().err
    assert "fits 18 releases\n    @@ Scheduler.event_loop_normal\n    + @functools.cache" in told
    assert git(tree, "diff") == before
    git(tree, "checkout", "--quiet", ".")

    # A fork with commits of its own and a work tree that is not clean takes the whole series.
    checkout = tmp_path / "fork"
    checkout.mkdir()
    git(checkout, "init", "--quiet", "--initial-branch=empty")
    commit_release(checkout, OTHER)
    git(checkout, "rm", "-r", "--quiet", "--force", ".")
    commit_release(checkout, NEW)
    scheduler = checkout / SCHEDULER
    scheduler.write_text(scheduler.read_text() + "\n\ndef of_the_fork():\n    return 1\n")
    git(checkout, "commit", "--quiet", "--all", "--message=a commit of the fork")
    (checkout / SLOTS).with_name("notes.txt").write_text("not committed\n")
    scheduler.write_text("edited, not committed\n")
    state = git(checkout, "status", "--porcelain"), git(checkout, "rev-parse", "HEAD")
    for branch in ("ours", "again"):
        assert main(["am", str(checkout), "--branch", branch]) == 0
    assert (git(checkout, "status", "--porcelain"), git(checkout, "rev-parse", "HEAD")) == state
    assert git(checkout, "rev-parse", "ours") == git(checkout, "rev-parse", "again")
    assert "def of_the_fork" in git(checkout, "show", f"ours:{SCHEDULER}")
    assert 'when="idle"' in git(checkout, "show", f"ours:{CHECKER}")
    git(checkout, "checkout", "--quiet", "--force", "ours")
    number = 1 + next(
        at for at, line in enumerate((checkout / CHECKER).read_text().splitlines())
        if "metadata_slots.check_idle" in line
    )  # fmt: skip
    capsys.readouterr()
    assert main(["annotate", f"{checkout / CHECKER}:{number}"]) == 0
    assert f"{number}: metadata-slots series/metadata-slots.seam:" in capsys.readouterr().out

    # One patch is picked to the branch of another release, and its unit tests pass there.
    commit = git(checkout, "log", "--format=%H", "--grep=^Seam: admission-truth$", "ours")
    git(checkout, "checkout", "--quiet", "--force", "-b", "pick", f"v{OTHER}")
    git(checkout, "cherry-pick", commit)
    assert main(["status", str(checkout)]) == 0
    assert "1 patch of the series" in capsys.readouterr().out
    pytest.importorskip("torch", reason="the unit tests of the picked patch need it")
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout / "python"),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ADMISSION_TEST],
        cwd=checkout, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert " passed" in run.stdout
