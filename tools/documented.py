# SPDX-License-Identifier: Apache-2.0
"""Where each command that the pages tell is run; those that no test runs are run here.

documented.py list           every command, and what runs it
documented.py run [WORD…]    word for word, most on real servers; all, or those with a WORD
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / n for n in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
HERE = "tools/documented.py run"

# A command by what it begins with -> the file that runs it, and words there that do.
RUN_BY = {
    "make documented": ("Makefile", "tools/documented.py run"),
    "make help": ("test/seam/test_repository.py", '"make", "help"'),
    "make matrix": ("test/seam/test_story.py", "<!-- make matrix -->"),
    "make serve": ("test/lab/test_cli.py", '"up"'),
    "make setup": ("Makefile", "test: setup"),
    "make test": (".ci/run", "exec make test"),
    "make test-release": ("Makefile", "test-release R="),
    "make test-revert": ("docs/first-patch.md", "registered.py revert"),
    "pdlab up": ("test/lab/test_cli.py", '"up"'),
    "pip install": ("test/seam/test_pages.py", "pip install"),
    "seam am": ("test/seam/test_story.py", '"am"'),
    "seam annotate": ("test/seam/test_story.py", '"annotate"'),
    "seam check": ("Makefile", "$(SEAM) check"),
    "seam diff": ("docs/first-patch.md", "seam diff"),
    "seam drift": ("test/seam/test_upkeep.py", '"drift"'),
    "seam new": ("docs/first-patch.md", "seam new"),
    "seam refresh": ("test/seam/test_story.py", '"refresh"'),
    "seam release": ("test/seam/test_upkeep.py", '"release"'),
    "seam series": ("test/seam/test_package.py", '"seam series"'),
    "seam status": ("test/seam/test_story.py", '"status"'),
    "seam tree": ("Makefile", "$(SEAM) tree"),
    "tools/documented.py": ("Makefile", "tools/documented.py run"),
    "tools/registered.py": ("Makefile", "tools/registered.py"),
}
# What stands for something else, is not there yet, or wants a GPU.
PLACEHOLDER = re.compile(r"[…\[<]|\b(SCENARIO|DIR|FILE|NAME|TREE|VERSION)\b|0\.5\.24|cuda")


def commands(page: Path) -> list[list[str]]:
    """What a page has in code spans and code blocks, word by word."""
    text = page.read_text()
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    # A remark stands behind a # or behind a gap.
    lines = [re.split(r"#|\s{2,}", line.strip())[0] for b in blocks for line in b.splitlines()]
    return [words for line in [*lines, *spans] if (words := line.split())]


def home(words: list[str]) -> str | None:
    """What runs a command; None when it is none of this project's, "" when nothing does."""
    command, *rest = words
    if command in ("make", "seam", "pip", "pdlab"):
        if not rest or not re.fullmatch(r"[a-z][a-z-]*", rest[0]):
            return None
        if (found := RUN_BY.get(f"{command} {rest[0]}")) or command in ("seam", "pip"):
            return found[0] if found else ""
        if command == "make" or rest[0] in ("run", "compare"):
            return HERE
        return ""
    if re.fullmatch(r"bench/\w+\.py", command):
        runner = "bench/all.py"
        known = command == runner or f'"{Path(command).stem}"' in (ROOT / runner).read_text()
        return runner if known else ""
    if re.fullmatch(r"tools/\w+\.py", command):
        return RUN_BY.get(command, ("",))[0]
    if re.fullmatch(r"(test/\w+/)?test_\w+\.py", command):
        found_test = list((ROOT / "test").rglob(Path(command).name))
        return str(found_test[0].relative_to(ROOT)) if found_test else ""
    return None


def own() -> Iterator[list[str]]:
    """The commands that no test runs, each once; words that stand for something else are left."""
    seen = set()
    for page in PAGES:
        for words in commands(page):
            line = " ".join(words)
            if home(words) == HERE and not PLACEHOLDER.search(line) and line not in seen:
                seen.add(line)
                # `pdlab run` alone is a way to speak of the verb.
                if words[0] == "make" or len(words) > 2 or words[1] == "compare":
                    yield words


def run(chosen: list[list[str]]) -> int:
    """Run commands one after the other; what they write stays out of the repository."""
    failed = []
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "build").symlink_to(ROOT / "build")
        for words in chosen:
            print(f"\n$ {' '.join(words)}", flush=True)
            make = words[0] == "make"
            command = words if make else [sys.executable, "-m", *words]
            begin = time.monotonic()
            code = subprocess.run(command, cwd=ROOT if make else name).returncode
            print(f"exit status {code}, {time.monotonic() - begin:.0f} s", flush=True)
            if code:
                failed.append(" ".join(words))
    for line in failed:
        print(f"FAILED  {line}", file=sys.stderr)
    return int(bool(failed))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("list", "run"))
    parser.add_argument("word", nargs="*")
    given = parser.parse_args()
    if given.action == "run":
        asked = set(given.word)
        return run([words for words in own() if not asked or asked & set(words)])
    told = {" ".join(words): home(words) for page in PAGES for words in commands(page)}
    for line, by in sorted(told.items()):
        if by is not None:
            print(f"{line}\n    {by or 'NOTHING RUNS IT'}")
    return int("" in told.values())


if __name__ == "__main__":
    sys.exit(main())
