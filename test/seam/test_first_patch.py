# SPDX-License-Identifier: Apache-2.0
"""The page for a first patch, followed word for word in a clone."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from workshop import WHO, git

from seam.series import Series
from seam.wheels import cache, is_cached

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "first-patch.md"
NAME = "high-water"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """This repository as it stands, set up, in a work tree of its own."""
    if not importlib.util.find_spec("sglang"):  # importing it would be seen by other tests
        pytest.skip("make setup installs sglang")
    missing = [one.wheel for one in Series.load(ROOT).releases.values() if not is_cached(one)]
    if missing:
        pytest.skip(f"{missing[0]} is not in the cache; `seam check` fetches it")
    folder = tmp_path / "clone"
    built = shutil.ignore_patterns(".git", ".venv", "build", "dist", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, folder, ignore=built)
    (folder / ".venv").symlink_to(sys.prefix)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=as it stands")
    return folder


@pytest.mark.timeout(1800)
def test_followed_word_for_word(clone: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    environment = {
        **os.environ,
        **WHO,
        "PYTHONPATH": str(clone / "src"),
        "SEAM_CACHE": str(cache()),
    }
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "".join(blocks)],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    marks = next(line for line in run.stdout.splitlines() if line.startswith(f"{NAME} "))
    assert marks.split()[1:] == ["x"] * len(Series.load(ROOT).releases)
    assert re.search(r"1 fail: test_the_mark_stays_when_items_are_taken", run.stdout)
    assert "\n+    @high_water.noted\n" in run.stdout.rpartition("diff --git")[0]
    assert "A `put` that" in (clone / "python/sglang/srt/disaggregation/high_water.py").read_text()
    assert git(clone, "status", "--porcelain") == ""
