# SPDX-License-Identifier: Apache-2.0
"""Every patch is told about wherever patches are, in one form, and what is told exists."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from pathlib import Path

import documented
import pytest
from packaging.version import Version

from pdlab.scenarios import SCENARIOS
from seam import cli
from seam.seamfile import Patch
from seam.series import Series

ROOT = Path(__file__).resolve().parents[2]
LEDGER = ROOT / "docs" / "ledger"
SERIES = Series.load()
PATCHES = {patch.name: patch for patch in SERIES.patches}
PAGES = sorted(page for page in LEDGER.glob("*.md") if page.name != "README.md")

# The form of an investigation, in this order; more may stand between, and a head may say more
# behind a colon.
SECTIONS = (
    "Symptom",
    "First evidence",
    "Hypotheses",
    "Experiment",
    "Verdict",
    "Directive",
    "Not tested",
)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def seam_verbs() -> set[str]:
    """The verbs that `seam --help` lists."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        cli.main(["--help"])
    return set(re.findall(r"^    ([a-z]+) ", shown.getvalue(), re.MULTILINE))


def sections(page: Path) -> dict[str, str]:
    """The text below each bold head of a page, by head."""
    parts = re.split(r"^\*\*([^*]+?)(?::[^*]*)?\.?\*\*", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_has_its_page_its_row_and_its_line(name: str) -> None:
    assert (LEDGER / f"{name}.md").is_file()
    assert f"[{name}]({name}.md)" in (LEDGER / "README.md").read_text()
    assert f"`{name}`" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\n| `{name}` |" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_tells_one_patch_in_the_common_form(page: Path) -> None:
    assert page.stem in PATCHES
    heads = [head for head in sections(page) if head in SECTIONS]
    assert heads == list(SECTIONS)
    assert all(sections(page)[head].strip() for head in SECTIONS)


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_and_its_page_agree(name: str) -> None:
    """A directive to those who come after, and what was not tested, are in both or in neither."""
    patch, told = PATCHES[name], sections(LEDGER / f"{name}.md")
    for trailer, head in (("Directive", "Directive"), ("Not-tested", "Not tested")):
        assert bool(patch.trailer(trailer)) == (told[head].strip(" \n.") not in ("", "Nothing"))


@pytest.mark.parametrize("name", PATCHES)
def test_the_readme_names_the_releases_of_a_patch(name: str) -> None:
    row = re.search(rf"^\| `{name}` \| ([^|]+) \|", (ROOT / "README.md").read_text(), re.M)
    assert row
    said = row[1]
    known = sorted(SERIES.releases, key=Version)
    mine = [r for r in known if r in releases_of(PATCHES[name])]
    first = None if mine[0] == known[0] else mine[0]
    last = None if mine[-1] == known[-1] else mine[-1]
    assert (first is None or first in said) and (last is None or last in said)
    assert ("all" in said) == (first is None and last is None and "upstream" not in said)


def test_operators_are_told_every_switch_of_the_series() -> None:
    upstream = {
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE",
        "SGLANG_USE_CPU_ENGINE",
    }
    modules = "".join(file.read_text() for file in (ROOT / "python").rglob("*.py"))
    switches = set(re.findall(r"\bSGLANG_[A-Z_]+\b", modules)) - upstream
    page = (ROOT / "docs" / "operators.md").read_text()
    assert {switch for switch in switches if f"| `{switch}` |" not in page} == set()


def releases_of(patch: Patch) -> set[str]:
    return {name for name, release in SERIES.releases.items() if release.version in patch.releases}


@pytest.mark.parametrize("page", documented.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_is_told_exists(page: Path) -> None:
    for words in documented.commands(page):
        command, *rest = words
        given = [word for word in rest if re.fullmatch(r"[a-z][a-z-]*", word)]
        if command == "make":
            assert set(given) <= TARGETS, words
        elif command == "pdlab" and given:
            assert given[0] in ("up", "run", "compare"), words
            if given[0] != "up":
                names = [word for word in rest[1 : _first_option(rest)] if word.isalpha()]
                assert set(names) <= SCENARIOS.keys(), words
        elif command == "seam" and given and rest[0] == given[0]:
            assert given[0] in seam_verbs(), words
        elif re.fullmatch(r"(bench|tools|test|src)/\S+\.py", command):
            assert (ROOT / command).is_file(), words
        elif re.fullmatch(r"test_\w+\.py", command):
            assert list((ROOT / "test").rglob(command)), words


@pytest.mark.parametrize("page", documented.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_is_told_is_run_somewhere(page: Path) -> None:
    nowhere = [words for words in documented.commands(page) if documented.home(words) == ""]
    assert nowhere == []


@pytest.mark.parametrize("command", documented.RUN_BY)
def test_what_is_said_to_run_a_command_does(command: str) -> None:
    file, words = documented.RUN_BY[command]
    assert words in (ROOT / file).read_text()
    assert any(
        line[: len(command.split())] == command.split()
        for page in documented.PAGES
        for line in documented.commands(page)
    )


def test_make_help_lists_what_make_can_do() -> None:
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = set(re.findall(r"^  make ([a-z-]+)", told.stdout, re.MULTILINE))
    assert listed == TARGETS


def _first_option(words: list[str]) -> int | None:
    return next((place for place, word in enumerate(words) if word.startswith("-")), None)
