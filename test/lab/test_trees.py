# SPDX-License-Identifier: Apache-2.0
"""A tree is recognised, or refused with the way to get one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pdlab import preflight, trees
from pdlab.errors import LabError
from pdlab.settings import Device
from seam.stamp import Stamp


@pytest.fixture
def tree(tmp_path: Path, fake_tree: Path) -> Path:
    shutil.copytree(fake_tree, tmp_path / "tree")
    return tmp_path / "tree"


def test_an_unstamped_tree_has_its_package_s_release_and_no_patches(tree: Path) -> None:
    found = trees.existing(tree, "stock")
    assert (found.release, found.patches) == ("9.9.9", ())
    assert found.path == (tree / "python",)
    assert "no patches" in found.describe()


def test_a_stamped_tree_tells_its_patches(tree: Path) -> None:
    stamp = Stamp("cpu-pd", "subject", "0.5.23")
    (tree / stamp.path).parent.mkdir(parents=True)
    (tree / stamp.path).write_bytes(stamp.render())
    found = trees.existing(tree, "patched", "a note")
    assert (found.release, found.patches) == ("0.5.23", ("cpu-pd",))
    assert found.describe() == f"SGLang 0.5.23, cpu-pd ({tree}; a note)"


def test_a_release_brings_its_pins(tree: Path, tmp_path: Path) -> None:
    pins = tmp_path / "pins" / "9.9.9"
    pins.mkdir(parents=True)
    assert trees.existing(tree, "patched").path == (tree / "python", pins)


def test_a_directory_that_is_no_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"is not a tree: .*build one with: seam tree"):
        trees.existing(tmp_path, "patched")


def test_what_seam_says_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"no tree for SGLang 1\.2\.3: seam: .*1\.2\.3"):
        trees.patched("1.2.3", tmp_path)


@pytest.mark.parametrize(
    ("device", "patches"), [(Device.CPU, ["series-stamp", "cpu-pd"]), (Device.CUDA, None)]
)
def test_stock_is_untouched_but_for_what_a_cpu_needs(
    device: Device, patches: list[str] | None, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(words)
        shutil.copytree(tree, words[4])
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(trees, "installed", lambda: trees.Tree("stock", "9.9.9", (), None))
    found = trees.stock("9.9.9", tree.parent, device)
    if patches is None:
        assert calls == []
        assert found.path == ()
        with pytest.raises(LabError, match=r"stock is the installed SGLang 9\.9\.9, not 1\.0"):
            trees.stock("1.0", tree.parent, device)
    else:
        [words] = calls
        assert words[5:7] == patches
        assert words[7:] == ["--release", "9.9.9", "--replace"]
        assert "stock + cpu-pd" in found.describe()


def test_a_missing_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "PACKAGES", {})
    monkeypatch.setattr(
        preflight, "LIBRARIES", {"libc.so.6": "libc6", "libibverbs.so.99": "libibverbs99"}
    )
    with pytest.raises(LabError, match=r"apt-get install libibverbs99$"):
        preflight.check()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "PACKAGES", {"no_such_module": "no-such-module"})
    with pytest.raises(LabError, match=r"no_such_module is not installed; .*no-such-module"):
        preflight.check()


def test_missing_stand_ins_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight.standin, "python_path", lambda: tmp_path)
    with pytest.raises(LabError, match="stand-in operators are missing"):
        preflight.standin_path(Device.CPU)
    assert preflight.standin_path(Device.CUDA) == ()


def test_a_real_sgl_kernel_needs_no_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.standin, "python_path", lambda: None)
    assert preflight.standin_path(Device.CPU) == ()
