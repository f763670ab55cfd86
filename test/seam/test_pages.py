# SPDX-License-Identifier: Apache-2.0
"""The commands of the pages for users, run word for word on real release sources."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from environment import SEAM_NEEDS, Environment
from workshop import WHO, git

from seam.series import Series
from seam.wheels import Wheel, is_cached

ROOT = Path(__file__).resolve().parents[2]
SERIES = Series.load(ROOT)
BLOCK = re.compile(r"^```(sh|dockerfile)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Shell:
    """A shell of a user: a folder, and an environment with its own `pip`, `seam` and `git`."""

    def __init__(self, folder: Path, environment: Environment) -> None:
        self.folder, self.environment = folder, environment

    def run(self, commands: str) -> str:
        """What the commands print; each of them must succeed."""
        return self.environment.run(commands, self.folder, **WHO).stdout


def blocks(page: str, heading: str) -> Iterator[str]:
    """The commands under a heading of a page, block by block; a Dockerfile's as a shell's."""
    text = (ROOT / page).read_text()
    section = text.split(f"## {heading}\n", 1)[1].partition("\n## ")[0]
    for match in BLOCK.finditer(section):
        yield "".join(map(_as_shell, match[2].splitlines(keepends=True)))


def _as_shell(line: str) -> str:
    word, _, rest = line.partition(" ")
    return {
        "FROM": "\n",
        "RUN": rest,
        "ENV": f"export {rest}",
        "WORKDIR": f"cd {rest}",
        "docker": rest.removeprefix("exec sglang "),
    }.get(word, line)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with SGLang, its `pip` and a place to get us from."""
    pytest.importorskip("hatchling", reason="builds the wheel that `pip install` takes")
    folder = tmp_path_factory.mktemp("environment")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "-w", str(folder / "wheels"), str(ROOT)]
    subprocess.run(command, check=True)
    return Environment(folder / "venv", (*SEAM_NEEDS, "sglang"), folder / "wheels")


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of 0.5.11 and 0.5.23, tagged: the files that the series looks at."""
    folder = tmp_path_factory.mktemp("sources")
    git(folder, "init", "--quiet", "--initial-branch=main")
    for name in ("0.5.11", "0.5.23"):
        release = SERIES.release(name)
        if not is_cached(release):
            pytest.skip(f"{release.wheel} is not in the cache; `seam check` fetches it")
        if (folder / "python").exists():
            shutil.rmtree(folder / "python")
        with Wheel(release) as wheel:
            for path in wheel.paths():
                if path in _looked_at() or path.endswith(("srt/__init__.py", "_version.py")):
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    (folder / path).write_bytes(wheel.read(path) or b"")
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", f"--message=sglang {name}")
        git(folder, "tag", f"v{name}")
    return folder


def _looked_at() -> set[str]:
    files = (path for patch in SERIES.patches for file in patch.files for path in file.paths)
    return {f"python/sglang/srt/{path}" for path in files}


@pytest.fixture
def shell(tmp_path: Path, environment: Environment, sources: Path) -> Shell:
    """A user's folder with a checkout: branches with own commits, and a dirty work tree."""
    folder = tmp_path / "sglang"
    shutil.copytree(sources, folder)
    for branch in ("hotfix", "release"):
        git(folder, "checkout", "--quiet", "-B", branch, "v0.5.23")
        decode = folder / "python/sglang/srt/disaggregation/decode.py"
        decode.write_text(decode.read_text() + f"\n\nOWN = {branch!r}\n")
        (folder / "own.txt").write_text("own\n")
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "--message=own work")
    (folder / "own.txt").write_text("not committed\n")
    return Shell(tmp_path, environment)


def install(shell: Shell) -> None:
    """Have `seam`, whether or not an earlier test put it there."""
    shell.run("pip install -q sglang-pd-series")


def patches_of(folder: Path, ref: str) -> list[str]:
    """The patches that the commits above 0.5.23 say they are."""
    log = git(folder, "log", "--reverse", "--format=%(trailers:key=Seam,valueonly)", ref)
    return log.split()


def test_readme_three_uses(shell: Shell) -> None:
    serve, run_tests, cherry_pick = blocks("README.md", "Three uses")
    told = shell.run(serve)
    assert "applied              transfers-first" in told and "sglang 0.5.23, " in told
    shell.environment.lend(one.metadata["Name"] for one in metadata.distributions())
    assert re.search(r"\d+ passed", shell.run(run_tests))
    shell.run(cherry_pick)
    assert patches_of(shell.folder / "sglang", "release") == ["transfers-first"]


def test_readme_for_one_patch(shell: Shell) -> None:
    (commands,) = blocks("README.md", "Only one patch")
    told = shell.run(commands)
    assert "1 patch of the series" in told
    checkout = shell.folder / "sglang"
    assert patches_of(checkout, "release") == ["transfers-first"]
    assert git(checkout, "status", "--porcelain") == "M own.txt"


def test_release_branch(shell: Shell, tmp_path: Path) -> None:
    install(shell)
    page, checkout = "docs/release-branch.md", tmp_path / "sglang"
    own = git(checkout, "rev-parse", "release")

    (commands,) = blocks(page, "All patches")
    shell.run(commands)
    laid = patches_of(checkout, "release")
    assert laid[0] == SERIES.patches[0].name and len(laid) > len(SERIES.patches) // 2
    assert git(checkout, "merge-base", "release", own) == own
    assert git(checkout, "status", "--porcelain") == "M own.txt"

    (commands,) = blocks(page, "One patch")
    assert "transfers_first.py" in shell.run(commands)

    pick, elsewhere = blocks(page, "Pick, revert, mail")
    shell.run(pick)
    assert patches_of(checkout, "hotfix") == ["transfers-first", "parallel-samples"]
    shell.run(elsewhere)
    assert patches_of(checkout, "one-on-0.5.11") == ["transfers-first"]
    assert git(checkout, "status", "--porcelain", "--untracked-files=no") == "M own.txt"


def test_release_branch_moves_to_a_newer_series(shell: Shell, tmp_path: Path) -> None:
    install(shell)
    page, checkout = "docs/release-branch.md", tmp_path / "sglang"
    older_series(tmp_path)
    (commands,) = blocks(page, "All patches")
    shell.run(commands)
    older = patches_of(checkout, "release")
    shutil.rmtree(tmp_path / "src")  # the one that is installed is newer
    (commands,) = blocks(page, "A newer series")
    assert "taken out first: " in shell.run(commands)
    assert [*older, SERIES.patches[-1].name] == patches_of(checkout, "release")[len(older) :]
    text = git(checkout, "show", "release:python/sglang/srt/disaggregation/decode.py")
    assert "OWN = 'release'" in text
    shell.run("seam am sglang --onto v0.5.23 --branch plain")
    changed = git(checkout, "diff", "--name-only", "plain", "release").split()
    assert changed == ["own.txt", "python/sglang/srt/disaggregation/decode.py"]


def older_series(folder: Path) -> None:
    """A series of which the last patch is not there yet, and a module was another."""
    (folder / "src" / "seam").mkdir(parents=True)
    for part in ("series", "python", "test/registered"):
        shutil.copytree(ROOT / part, folder / part)
    order = folder / "series" / "series"
    order.write_text(order.read_text().replace(f"\n{SERIES.patches[-1].name}\n", "\n"))
    module = next(path for path in SERIES.patches[0].adds if path.startswith("python/"))
    (folder / module).write_text((folder / module).read_text() + "# older\n")


def test_image_with_a_wheel(shell: Shell, tmp_path: Path) -> None:
    dockerfile, ask = (
        block.replace("/opt/", f"{tmp_path}/opt/")
        for heading in ("SGLang installed from its wheel", "What is running there?")
        for block in blocks("docs/images.md", heading)
    )
    told = shell.run(dockerfile + ask)
    assert told.count(f"{tmp_path}/opt/sglang-pd/python: sglang 0.5.23, ") == 2
    assert '"ok": true' in told
    assert "stock: no patch" in shell.run("seam status")


def test_image_with_a_checkout(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "sgl-workspace").mkdir()
    (tmp_path / "sglang").rename(tmp_path / "sgl-workspace" / "sglang")
    (commands,) = blocks("docs/images.md", "SGLang installed from a checkout (`pip install -e`)")
    told = shell.run(commands.replace("/sgl-workspace", f"{tmp_path}/sgl-workspace"))
    assert "patches of the series" in told and "changed " not in told
