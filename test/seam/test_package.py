# SPDX-License-Identifier: Apache-2.0
"""What `python -m build` makes can be installed alone and does its work there."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from environment import SEAM_NEEDS, Environment

from seam.series import Series
from seam.wheels import is_cached

ROOT = Path(__file__).resolve().parents[2]
SERIES = Series.load(ROOT)
LAB_NEEDS = (
    "aiohappyeyeballs",
    "aiohttp",
    "aiosignal",
    "attrs",
    "frozenlist",
    "idna",
    "multidict",
    "numpy",
    "orjson",
    "propcache",
    "psutil",
    "pyzmq",
    "safetensors",
    "typing_extensions",
    "yarl",
)
BACKEND = ("hatchling", "pathspec", "pluggy", "trove-classifiers")
RELEASE = "0.5.23"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both artefacts: the wheel is made from the sdist."""
    pytest.importorskip("build", reason="make setup installs it")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def test_the_sdist_is_what_the_repository_tracks(dist: Path) -> None:
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("this is not a git checkout")
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        files = {member.name.partition("/")[2] for member in packed if not member.isdir()}
    here = {name for name in tracked.stdout.split("\0") if name and (ROOT / name).exists()}
    assert here <= files
    assert not {name.partition("/")[0] for name in files} & {".git", ".venv", "build", "dist"}


@pytest.mark.parametrize("artefact", ["*.whl", "*.tar.gz"])
def test_an_artefact_works_in_an_empty_environment(
    dist: Path, tmp_path: Path, artefact: str
) -> None:
    if not is_cached(SERIES.release(RELEASE)):
        pytest.skip(f"{SERIES.release(RELEASE).wheel} is not in the cache; `seam check` fetches it")
    (file,) = dist.glob(artefact)
    # A wheel is installed as it is; an sdist makes its wheel with the backend that is there.
    backend = () if artefact == "*.whl" else BACKEND
    environment = Environment(tmp_path / "venv", (*SEAM_NEEDS, *backend), dist)
    environment.run(f"pip install -q --no-build-isolation '{file}'", tmp_path)

    listed = environment.run("seam series", tmp_path).stdout
    assert [line.partition(":")[0] for line in listed.splitlines() if line[0] != " "] == [
        patch.name for patch in SERIES.patches
    ]
    checked = environment.run(f"seam check {RELEASE}", tmp_path).stdout
    assert all(f"\n{patch.name} " in checked for patch in SERIES.patches)
    without = environment.run("pdlab --help", tmp_path, status=1)
    assert without.stderr.endswith("pip install 'sglang-pd-series[lab]'\n")

    environment.lend(("sglang", *LAB_NEEDS))
    environment.run("seam tree patched --from sglang", tmp_path)
    assert f"sglang {RELEASE}, " in environment.run("seam status patched", tmp_path).stdout
    assert environment.run("pdlab --help", tmp_path).stdout.startswith("usage: pdlab")
