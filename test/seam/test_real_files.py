# SPDX-License-Identifier: Apache-2.0
"""What holds for the real files of every supported release, whatever is done to them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from workshop import assert_as_parsed, on_shop, undone

from seam.errors import Kind, Misfit, SeamError
from seam.filelayer import FileResult, resolve_file
from seam.resolve import Standing
from seam.seamfile import ANCHOR_LIMIT
from seam.series import Series
from seam.source import BOM, Definition, Scope, Source
from seam.wheels import Wheel, is_cached

SERIES = Series.load(Path(__file__).resolve().parents[2])
LAYOUTS = ("as it is", "carriage returns", "byte order mark", "no last newline")
EXAMPLES = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@functools.lru_cache(maxsize=1)
def contents(release: str) -> dict[str, bytes]:
    """The files of a release that the series looks at."""
    names = {path for patch in SERIES.patches for file in patch.files for path in file.paths}
    with Wheel(SERIES.release(release)) as wheel:
        read = {name: wheel.read(f"python/sglang/srt/{name}") for name in sorted(names)}
    return {name: content for name, content in read.items() if content is not None}


@functools.lru_cache(maxsize=8)
def source(release: str, path: str, layout: str) -> Source:
    """A file in a layout that its authors did not choose."""
    content = contents(release)[path]
    if layout == "carriage returns":
        content = content.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    if layout == "byte order mark":
        content = BOM + content.removeprefix(BOM)
    if layout == "no last newline":
        content = content.rstrip(b"\r\n")
    return Source(content, path)


def scopes(root: Scope, outer: str = "") -> Iterator[tuple[str, Definition]]:
    """All classes and functions by dotted name, those in each other among them."""
    for node in root.body:
        if isinstance(node, Definition):
            yield f"{outer}{node.name}", node
            yield from scopes(node, f"{outer}{node.name}.")


def anchor(node: ast.AST) -> str | None:
    """A node as an anchor of one line, the head alone of a statement with a body."""
    text = ast.unparse(node)
    if hasattr(node, "body"):
        text = text.partition("\n")[0]
    fits = "\n" not in text and len(text) <= ANCHOR_LIMIT and "$" not in text
    return text if fits else None


@st.composite
def hunks(draw: st.DrawFn, file: Source) -> str:
    """A hunk on some place of the file."""
    scope, node = draw(st.sampled_from([*scopes(file.tree)]))
    kind = draw(st.sampled_from(["top", "decorate", "before", "after", "wrap", "extend"]))
    if kind in ("top", "decorate"):
        return f"@@ {scope}\n+ {'probe(1)' if kind == 'top' else '@probe'}"
    if kind in ("before", "after"):
        statements = [one for suite in file.suites(node) for one in suite if one is not node]
        text = anchor(draw(st.sampled_from(statements)))
        assume(text is not None and not text.startswith(("elif", "@")))
        lines = ["+ if probe:", "+     probe(1)", f"  {text}"]
        return "\n".join([f"@@ {scope}", *(lines if kind == "before" else [lines[2], *lines[:2]])])
    calls = file.nodes(node, ast.Call)
    assume(calls)
    call = draw(st.sampled_from(calls))
    assert isinstance(call, ast.Call)
    text, name = anchor(call), anchor(call.func)
    assume(text is not None and name is not None)
    if kind == "wrap":
        return f"@@ {scope}\n- {text}\n+ probe({text})"
    return f"@@ {scope}\n- {name}($*all)\n+ {name}(probe, $*all)"


def lay(file: Source, hunk: str) -> FileResult | None:
    """The file after the hunk, None when it has not just one place there."""
    try:
        (patch,) = on_shop(hunk).files
        return resolve_file(patch, file, file)
    except Misfit as misfit:
        assert misfit.kind in (Kind.AMBIGUOUS, Kind.BAD_PLACE, Kind.NO_SCOPE, Kind.NO_ANCHOR), hunk
    except SeamError as error:
        assert "a-patch.seam:" in str(error)
    return None


@pytest.mark.parametrize("release", SERIES.releases)
def test_edits_of_real_files_can_be_found_and_taken_out_again(release: str) -> None:
    if not is_cached(SERIES.release(release)):
        pytest.skip(f"the wheel of {release} is not in the cache; `seam check` fetches it")

    @EXAMPLES
    @given(st.data())
    def check(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from([*contents(release)]))
        file = source(release, path, data.draw(st.sampled_from(LAYOUTS)))
        result = lay(file, hunk := data.draw(hunks(file)))
        assume(result)
        assert result is not None and result.edits
        assert undone(result) == file.content
        assert_as_parsed(result.after)
        again = lay(result.after, hunk)
        assert again is not None and not again.edits
        assert {one.standing for one in again.hunks} == {Standing.PRESENT}

    check()
