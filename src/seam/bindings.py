# SPDX-License-Identifier: Apache-2.0
"""Which names a piece of Python binds."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.ExceptHandler, ast.MatchAs)
"""Syntax that binds its `name`."""
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")


def names_bound_by(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """The names that nodes bind, each taken by itself; `*` for all that an import brings."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name):
            names |= set() if isinstance(node.ctx, ast.Load) else {node.id}
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, NAMED) and node.name:
            names.add(node.name)
    return frozenset(names)


def bound_at_import(body: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """What a module or class body binds when it runs, each with its line, in source order.

    What stands under `if TYPE_CHECKING:` never runs; bodies of functions and classes bind
    names of their own.
    """
    for node in body:
        nested = () if isinstance(node, DEFINITIONS) else _blocks(node)
        heads = [node] if isinstance(node, NAMED) else _head(node)
        placed = node.pattern if isinstance(node, ast.match_case) else node
        for name in sorted(names_bound_by(heads)):
            yield name, getattr(placed, "lineno", 0)
        yield from bound_at_import(nested)


def _blocks(node: ast.AST) -> Iterator[ast.AST]:
    hidden = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    for field in BLOCKS[1:] if hidden else BLOCKS:
        yield from getattr(node, field, ())


def _head(node: ast.AST) -> Iterator[ast.AST]:
    """What belongs to a statement, the blocks in it left out."""
    for field, value in ast.iter_fields(node):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST) and field not in BLOCKS:
                yield from ast.walk(item)
