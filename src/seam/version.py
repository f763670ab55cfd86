# SPDX-License-Identifier: Apache-2.0
"""The version that a package says it has, read without importing it."""

from __future__ import annotations

import ast


def literal_version(content: bytes) -> str | None:
    """The string that a version module assigns to `__version__` at its top level."""
    for node in ast.parse(content).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if "__version__" in names and isinstance(node.value.value, str):
                return node.value.value
    return None
