# SPDX-License-Identifier: Apache-2.0
"""A patch on one release as a unified diff that git can apply."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from seam.layer import SRT, PatchResult

NO_NEWLINE = "\\ No newline at end of file\n"


def render(result: PatchResult) -> str:
    """The diff of all files of a patch, the stamp among them; empty when nothing is applied."""
    before = {SRT + file.before.path: file.before.content for file in result.files}
    return "".join(
        line
        for path, content in sorted(result.changes.items())
        for line in _file(path, before.get(path), content)
    )


def _file(path: str, before: bytes | None, after: bytes) -> Iterator[str]:
    yield f"diff --git a/{path} b/{path}\n"
    if before is None:
        yield "new file mode 100644\n"
    old, new = _lines(before or b""), _lines(after)
    source = "/dev/null" if before is None else f"a/{path}"
    for line in difflib.unified_diff(old, new, source, f"b/{path}"):
        yield line if line.endswith("\n") else f"{line}\n{NO_NEWLINE}"


def _lines(content: bytes) -> list[str]:
    """Lines with their ends, a carriage return being no end of its own."""
    lines = content.decode(errors="surrogateescape").split("\n")
    return [f"{line}\n" for line in lines[:-1]] + [line for line in lines[-1:] if line]
