# SPDX-License-Identifier: Apache-2.0
"""Small series, wheels and checkouts, in words of our own, for the tests of `seam`."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import textwrap
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from seam.filelayer import FileResult, check_forbidden, resolve_file
from seam.layer import Layer, PatchResult
from seam.seamfile import Patch, parse
from seam.source import Source

MESSAGE = """\
area: what it does

Why it is done.

Confidence: high
Scope-risk: narrow
Directive: none
Upstream: none
Tested: here
---
"""
PATH = "shop.py"
RELEASE = "0.5.23"
WHO = {
    f"GIT_{role}_{key}": value
    for role in ("AUTHOR", "COMMITTER")
    for key, value in (("NAME", "Somebody"), ("EMAIL", "somebody@example.org"))
}


def patch(body: str, name: str = "a-patch") -> Patch:
    """A patch whose seam file has `body` under a message that lints."""
    return parse(name, MESSAGE + textwrap.dedent(body))


def on_shop(hunks: str) -> Patch:
    """A patch of `shop.py` alone."""
    return patch(f"+++ {PATH}\n{textwrap.dedent(hunks)}")


def lay(code: str | bytes, hunks: str) -> FileResult:
    """Lay hunks over one file; its post-conditions are checked too."""
    content = textwrap.dedent(code).encode() if isinstance(code, str) else code
    source = Source(content, PATH)
    (file,) = on_shop(hunks).files
    result = resolve_file(file, source, source)
    check_forbidden(file, result.after)
    return result


def laid(code: str | bytes, hunks: str) -> str:
    """The file after laying hunks over it."""
    return lay(code, hunks).after.content.decode()


def undone(result: FileResult) -> bytes:
    """The file with every edit taken out again, by the places that the result names."""
    raw, before = result.after.raw, result.before.raw
    pieces, last = [], 0
    for edit, span in sorted(zip(result.edits, result.spans, strict=True), key=lambda x: x[1]):
        assert raw[span.start : span.end] == edit.text
        pieces += [raw[last : span.start], before[edit.span.start : edit.span.end]]
        last = span.end
    return result.after.bom + b"".join([*pieces, raw[last:]])


class Shelf:
    """A pristine source made of a dictionary: path under srt to text."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = {
            f"python/sglang/srt/{path}": textwrap.dedent(text).encode()
            for path, text in files.items()
        }

    def read(self, path: str) -> bytes | None:
        return self.files.get(path)

    def paths(self) -> Iterable[str]:
        return self.files

    def is_executable(self, path: str) -> bool:
        return False


def layer(
    files: Mapping[str, str],
    patches: Iterable[Patch],
    ours: Mapping[str, str] | None = None,
    release: str = RELEASE,
) -> dict[str, PatchResult]:
    """Lay patches over a dictionary of files; `ours` are the files that patches add."""
    added = {path: text.encode() for path, text in (ours or {}).items()}
    whole = Layer(Shelf(files), release, added.__getitem__)
    whole.lay(patches)
    return whole.results


SHOP = """\
import os

from sglang.srt import till


class Shop:
    def sell(self, item, price):
        # a sale
        till.open(item)
        self.total = self.total + price
        return till.close(item)
"""

FILES = {
    "sglang/__init__.py": "",
    "sglang/version.py": "from sglang._version import __version__\n",
    "sglang/srt/__init__.py": "",
    "sglang/srt/till.py": "def open(item): ...\n\n\ndef close(item):\n    return item\n",
    "sglang/srt/shop.py": SHOP,
    "sglang/srt/fast.cpython-311-x86_64-linux-gnu.so": "not really compiled",
    "sglang/tool.sh": "#!/bin/sh\n",
}

SEAMS = {
    "count-sales": MESSAGE
    + """\
adds python/sglang/srt/sales.py
adds test/registered/unit/test_sales.py

+++ shop.py
@@ import
+ from sglang.srt import sales

@@ Shop.sell
  till.open($item)
+ sales.count(item)
""",
    "round-total": MESSAGE
    + """\
needs: count-sales

+++ shop.py
@@ Shop.sell
- self.total + price
+ round(self.total + price, 2)
""",
    "close-till": MESSAGE
    + """\
+++ till.py
@@ close
+ assert item
""",
}

OURS = {
    "python/sglang/srt/sales.py": "def count(item):\n    return item\n",
    "test/registered/unit/test_sales.py": "assert True\n",
}


class Workshop:
    """A repository of a small series on disk, with the wheels of two releases in a cache."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repository"
        self.cache = folder / "wheels"
        self.folder = folder
        (self.root / "src" / "seam").mkdir(parents=True)
        self.cache.mkdir()
        self.write_series(SEAMS)
        for path, text in OURS.items():
            self.write(path, text)
        releases = [self.wheel("0.5.22"), self.wheel("0.5.23")]
        self.write("series/releases.toml", "\n".join(releases))

    def write(self, path: str, text: str) -> None:
        """Write a file of the repository."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def write_series(self, seams: Mapping[str, str]) -> None:
        """Write seam files and the order they are given in."""
        self.write("series/series", "# order\n" + "".join(f"{name}\n" for name in seams))
        for name, text in seams.items():
            self.write(f"series/{name}.seam", text)

    def wheel(self, release: str, other: Mapping[str, str] | None = None) -> str:
        """Build a wheel of a tiny sglang into the cache; returns its entry in releases.toml."""
        name = f"sglang-{release}-py3-none-any.whl"
        version = f'__version__ = version = "{release}"\n'
        files = {**FILES, "sglang/_version.py": version, **(other or {})}
        if release == "0.5.22":
            files["sglang/srt/old.py"] = "def gone(item):\n    return item\n"
        with zipfile.ZipFile(self.cache / name, "w") as archive:
            for path, text in files.items():
                info = zipfile.ZipInfo(path, (2026, 10, 30, 1, 2, 4))
                info.external_attr = (0o755 if path.endswith(".sh") else 0o644) << 16
                archive.writestr(info, text)
        digest = hashlib.sha256((self.cache / name).read_bytes()).hexdigest()
        return textwrap.dedent(f"""\
            [[release]]
            version = "{release}"
            released = 2026-10-30
            wheel = "{name}"
            sha256 = "{digest}"
            requires-python = ">=3.10"
            torch = "2.14.1"
            pins = ["transformers==5.19.0"]
            """)

    def checkout(self, name: str = "checkout", release: str | None = "0.5.23") -> Path:
        """A git checkout of the tiny sglang, tagged with its release."""
        folder = self.folder / name
        for path, text in FILES.items():
            file = folder / "python" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        git(folder, "init", "--quiet", "--initial-branch=main")
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "--message=sources")
        if release:
            git(folder, "tag", f"v{release}")
        return folder


def git(folder: Path, *args: str) -> str:
    """Output of a git command, run as somebody, at a fixed time."""
    dates = dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "1770000000 +0000")
    run = subprocess.run(
        ["git", *args],
        cwd=folder,
        env={**os.environ, **WHO, **dates},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def assert_as_parsed(grown: Source) -> None:
    """The tree of a source reads, and stands, as that of its bytes parsed anew."""
    fresh = Source(grown.content, grown.path)
    fresh.outline = ast.parse(fresh.raw)  # as a whole
    pairs: list[tuple[object, object]] = [(grown.tree, fresh.tree)]
    while pairs:
        one, other = pairs.pop()
        assert type(one) is type(other)
        if isinstance(one, list) and isinstance(other, list):
            pairs += zip(one, other, strict=True)
        elif isinstance(one, ast.AST) and isinstance(other, ast.AST):
            if isinstance(one, (ast.expr, ast.stmt, ast.arg, ast.keyword, ast.alias)):
                assert grown.span(one) == fresh.span(other)
                assert grown.line_of(one) == fresh.line_of(other)
            pairs += ((getattr(one, n, None), getattr(other, n, None)) for n in one._fields)
        else:
            assert one == other
