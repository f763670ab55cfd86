# SPDX-License-Identifier: Apache-2.0
"""Which names the `+` lines of a patch may use where they stand."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable

from seam.bindings import bound_at_import, names_bound_by
from seam.errors import Kind, Misfit
from seam.filelayer import FileResult
from seam.pattern import bound_names, used_names
from seam.resolve import Edit
from seam.seamfile import Op, Seam
from seam.source import Definition, Source

BUILTINS = frozenset(dir(builtins)) | {"__file__", "__name__"}


def check_names(file: FileResult, pristine: Source, borrowed: Iterable[Seam]) -> None:
    """Raise `Misfit` when a `+` line uses a name that is not bound there, or not yet.

    `borrowed` are the seams that the patches it needs have in the same file; what any other
    patch binds does not count.
    """
    seams = {edit.seam for edit in file.edits}
    bound = {name for seam in seams.union(borrowed) for name in bound_names(seam.put)}
    bound |= BUILTINS | pristine.bindings.keys()
    for edit in file.edits:
        loose = used_names(edit.seam.put) - bound
        if loose and "*" not in pristine.bindings:
            loose -= _local_names(edit.seam, file.before)
            for name in sorted(loose):
                raise _unbound(edit, name, file.before)
    early = [edit for edit in file.edits if _runs_at_import(edit.seam, file.before)]
    places = file.before.bindings | _import_places(file.edits) if early else {}
    for edit in early:
        for name in sorted(used_names(edit.seam.put)):
            if places.get(name, -1) > edit.span.start:
                raise _too_early(edit, name, file.before, places[name])


def _import_places(edits: Iterable[Edit]) -> dict[str, int]:
    """Where the import seams of a patch bind their names."""
    return {
        name: edit.span.start
        for edit in edits
        if edit.seam.op is Op.IMPORT
        for name in bound_names(edit.seam.put)
    }


def _around(seam: Seam, source: Source) -> list[Definition]:
    """The definitions that the lines of a seam stand in, outermost first."""
    if seam.op is Op.IMPORT:
        return []
    around = source.heads(seam.scope)
    return around[:-1] if seam.op is Op.DECORATE else around


def _local_names(seam: Seam, source: Source) -> frozenset[str]:
    """What the functions around a seam bind, and the class in whose body it stands."""
    names: frozenset[str] = frozenset()
    around = _around(seam, source)
    for node in around:
        if not isinstance(node, ast.ClassDef):
            names |= names_bound_by(source.every_node(node))
        elif node is around[-1]:
            names |= {name for name, _ in bound_at_import(node.body)}
    return names


def _runs_at_import(seam: Seam, source: Source) -> bool:
    """Whether the lines run while the module is imported, not when a function is called."""
    around = _around(seam, source)
    return seam.op is not Op.IMPORT and all(isinstance(node, ast.ClassDef) for node in around)


def _unbound(edit: Edit, name: str, source: Source) -> Misfit:
    hidden = " when it runs" if source.mentions(name) else ""
    return Misfit(
        Kind.UNBOUND,
        f"'+' lines use {name}, which nothing in {source.path} binds{hidden}",
        "give it to the file under '@@ import'",
        line=edit.seam.line,
    )


def _too_early(edit: Edit, name: str, source: Source, at: int) -> Misfit:
    place = f"{source.path}:{source.line_number(edit.span.start)}"
    return Misfit(
        Kind.UNBOUND,
        f"'+' lines at {place} run before {name} is bound (line {source.line_number(at)})",
        "hook in inside of a function, or below the imports",
        line=edit.seam.line,
    )
