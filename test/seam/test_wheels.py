# SPDX-License-Identifier: Apache-2.0
"""A wheel is used only when it is the one that releases.toml names."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest
from workshop import Workshop

from seam import wheels
from seam.cli import main
from seam.errors import SeamError
from seam.series import Series


def test_wheel_with_another_hash_is_refused_and_kept(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    release = Series.load().release("0.5.23")
    wheel = workshop.cache / release.wheel
    wheel.write_bytes(wheel.read_bytes() + b"more")
    for verb in (["check"], ["check", "0.5.23"], ["tree", "new"], ["diff"]):
        assert main(verb) == 1
        told = capsys.readouterr().err
        assert f"{wheel} is not the wheel of 0.5.23" in told
        assert f"sha256 wanted {release.sha256}" in told and "sha256 found  " in told
        assert "delete the file" in told
    assert wheel.exists()
    assert main(["check", "0.5.22"]) == 0


def test_missing_wheel_without_pip_says_what_to_do(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("SEAM_CACHE", str(workshop.folder / "none"))
    assert main(["check", "0.5.23"]) == 1
    told = capsys.readouterr().err
    assert "this interpreter has no pip" in told and "-m ensurepip" in told


def test_wheel_that_pip_cannot_fetch_leaves_no_trace(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEAM_CACHE", str(workshop.folder / "new"))
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(SeamError, match=r"pip could not fetch sglang-.*whl: ERROR: no network"):
        wheels.fetch(Series.load().release("0.5.23"))
    assert list((workshop.folder / "new").iterdir()) == []


def test_cache_that_cannot_be_written_is_told(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workshop.folder / "file").write_text("")
    monkeypatch.setenv("SEAM_CACHE", str(workshop.folder / "file" / "cache"))
    with pytest.raises(SeamError, match="cannot write to the wheel cache"):
        wheels.fetch(Series.load().release("0.5.23"))


@pytest.mark.parametrize("right", [True, False])
def test_fetched_wheel_is_verified_before_it_is_kept(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    release = Series.load().release("0.5.23")
    content = (workshop.cache / release.wheel).read_bytes() + (b"" if right else b"more")
    cache = workshop.folder / "new"
    monkeypatch.setenv("SEAM_CACHE", str(cache))
    asked: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        folder = Path(command[command.index("--dest") + 1])
        requirement = Path(command[command.index("--requirement") + 1]).read_text()
        assert requirement == f"sglang==0.5.23 --hash=sha256:{release.sha256}\n"
        (folder / release.wheel).write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    if right:
        assert wheels.fetch(release) == cache / release.wheel
        assert wheels.fetch(release) == cache / release.wheel
        assert len(asked) == 1
    else:
        with pytest.raises(SeamError, match="is not the wheel of"):
            wheels.fetch(release)
    assert [path.name for path in cache.iterdir()] == ([release.wheel] if right else [])


def test_progress_names_what_has_to_be_fetched(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["check"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("SEAM_CACHE", str(workshop.folder / "none"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["check", "0.5.22"]) == 1
    assert capsys.readouterr().err.startswith("fetching sglang-0.5.22-py3-none-any.whl\n")
