# SPDX-License-Identifier: Apache-2.0
"""Imports by which a file of one patch takes from a patch that it does not need."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

from seam.faults import Fault
from seam.series import Series


def borrowed(series: Series) -> Iterator[Fault]:
    """Every import of another patch's module or test helper that `needs:` does not cover.

    An import that a `try` with `except ImportError` guards does without it, and is left alone.
    """
    owners = {path: patch.name for patch in series.patches for path in patch.adds}
    for patch in series.patches:
        known = {patch.name, *series.select([patch.name]).pulled}
        for path in patch.adds:
            for line, other in _imports(series, path):
                owner = owners.get(other)
                if owner and owner not in known:
                    reason = f"imports {other} of {owner}, which {patch.name} does not need"
                    yield Fault(path, line, f"{reason}: say 'needs: {owner}' in its seam file")


def _imports(series: Series, path: str) -> Iterator[tuple[int, str]]:
    """Where a file imports what, as line and path in the series."""
    file = series.root / path
    if not (path.endswith(".py") and file.is_file()):
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # its own tests tell
    for node in _unguarded(tree):
        for dotted in _names(node):
            inner = dotted.replace(".", "/")
            sibling = PurePosixPath(path).parent / f"{inner}.py"
            for place in (f"python/{inner}.py", f"python/{inner}/__init__.py", str(sibling)):
                yield getattr(node, "lineno", 0), place


def _unguarded(root: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(root):
        if isinstance(node, ast.Try) and any(map(_catches_import_error, node.handlers)):
            continue
        yield node
        yield from _unguarded(node)


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return not names.isdisjoint({"ImportError", "ModuleNotFoundError"})


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
