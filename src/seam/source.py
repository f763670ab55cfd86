# SPDX-License-Identifier: Apache-2.0
"""One upstream file: its bytes, their syntax tree, and splices that leave other bytes alone."""

from __future__ import annotations

import ast
import bisect
import contextlib
import difflib
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from seam.bindings import bound_at_import
from seam.errors import Kind, Misfit
from seam.outline import Fold, Function, outline
from seam.regrown import CannotRegrow, regrow

Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Scope: TypeAlias = ast.Module | Definition
Tree = TypeVar("Tree", bound=ast.AST)

NEWLINE = re.compile(rb"\r\n|\r|\n")
SUITES = frozenset({"body", "orelse", "finalbody"})
LEAVES = frozenset({ast.Name, ast.Constant, ast.Load, ast.Store})
"""Most nodes are of these, and nobody looks for what is below them."""
BOM = b"\xef\xbb\xbf"


class Span(NamedTuple):
    """A half-open byte range of a source."""

    start: int
    end: int


class Splice(NamedTuple):
    """The bytes that take the place of a span; an empty span inserts."""

    span: Span
    text: bytes


class Source:
    """A Python file as bytes and tree; offsets count bytes after the byte order mark."""

    def __init__(
        self, content: bytes, path: str, grown: tuple[Source, Sequence[Splice]] | None = None
    ) -> None:
        """Take `content`; raise `Misfit` (broken) when it is not UTF-8.

        `grown` are the source and the splices that made it, when they are known: its tree then
        takes over what they did not touch.
        """
        self.path = path
        self.content = content
        self.bom = BOM if content.startswith(BOM) else b""
        self.raw = content[len(self.bom) :]
        try:
            self.raw.decode()
        except UnicodeDecodeError as error:
            raise Misfit(Kind.BROKEN, f"{path}: not UTF-8 at byte {error.start}") from error
        sizes = map(len, self.raw.splitlines(keepends=True))
        self.starts = list(itertools.accumulate(sizes, initial=0))
        """Offset of each line; one more when the last line ends in a newline."""
        if self.starts[-1] and not self.raw.endswith((b"\n", b"\r")):
            self.starts.pop()
        self.newline = b"\r\n" if b"\r\n" in self.raw else b"\n"
        self.places = self.starts
        """Offset of each line that nodes name; see `regrown`."""
        self._grown = grown
        self._nodes: dict[int, tuple[ast.AST, dict[type[ast.AST], list[ast.AST]]]] = (
            grown[0]._nodes if grown else {}
        )
        self._folds: dict[int, tuple[Function, Fold, bytes]] = grown[0]._folds if grown else {}
        """Functions of the outline whose bodies are left out, with the file they are from."""
        self._definitions: dict[int, dict[str, list[Definition]]] = {}

    @property
    def tree(self) -> ast.Module:
        """The syntax tree; `Misfit` (broken) if the file is not Python."""
        return self._whole(self.outline)

    @functools.cached_property
    def outline(self) -> ast.Module:
        """The syntax tree, parsed when it is first asked for; `Misfit` (broken) if it cannot be.

        Bodies of functions may be left out; `scope`, `nodes` and all the others put them in.
        """
        grown, self._grown = self._grown, None
        if grown:
            with contextlib.suppress(CannotRegrow, SyntaxError):
                tree, self.places = regrow(*grown, self.raw)
                return tree
        outlined = outline(self.raw)
        if outlined:
            self._folds |= {id(node): (node, fold, self.raw) for node, fold in outlined[1]}
            return outlined[0]
        try:
            return ast.parse(self.raw)
        except SyntaxError as error:
            reason = f"{self.path}:{error.lineno}: not Python: {error.msg}"
        except ValueError as error:  # a zero byte, before Python 3.12
            reason = f"{self.path}: not Python: {error}"
        raise Misfit(Kind.BROKEN, reason)

    def _whole(self, root: Tree) -> Tree:
        """A node with all that is below it put in."""
        node, fold, raw = self._folds.pop(id(root), (None, None, b""))
        if node and fold:
            self._put_in(node, fold, raw)
        elif self._folds and isinstance(root, (ast.Module, ast.ClassDef)):
            for member in root.body:
                self._whole(member)
        return root

    def _put_in(self, node: Function, fold: Fold, raw: bytes) -> None:
        try:
            fold.unfold(node, raw)
        except (SyntaxError, ValueError) as error:
            reason = f"{self.path}: {node.name} is not Python: {error}"
            raise Misfit(Kind.BROKEN, reason) from error

    # positions -----------------------------------------------------------------------------

    def span(self, node: ast.AST) -> Span:
        """Byte range of a node that has a position; decorators are not part of a definition's."""
        assert isinstance(node, (ast.expr, ast.stmt, ast.arg, ast.keyword, ast.alias))
        assert node.end_lineno is not None and node.end_col_offset is not None
        return Span(
            self.places[node.lineno - 1] + node.col_offset,
            self.places[node.end_lineno - 1] + node.end_col_offset,
        )

    def end(self, node: ast.stmt) -> int:
        """Where a statement ends."""
        return self.span(node).end

    def line_of(self, node: ast.AST) -> int:
        """One-based line that a node starts on; 0 for one without a position."""
        line = getattr(node, "lineno", 0)
        return self.line_number(self.places[line - 1]) if line else 0

    def text(self, span: Span) -> str:
        """The source text of a span."""
        return self.raw[span.start : span.end].decode()

    def statement_start(self, node: ast.stmt) -> int:
        """Where a statement starts, its decorators included."""
        decorators = node.decorator_list if isinstance(node, Definition) else []
        if not decorators:
            return self.span(node).start
        return self.raw.rindex(b"@", 0, self.span(decorators[0]).start)

    def line_number(self, offset: int) -> int:
        """One-based line of an offset."""
        return bisect.bisect_right(self.starts, offset)

    def line_start(self, offset: int) -> int:
        """Offset at which the line of `offset` starts."""
        return self.starts[self.line_number(offset) - 1]

    def next_line(self, offset: int) -> int:
        """Offset at which the line after that of `offset` starts, or the end of the file."""
        line = self.line_number(offset)
        return self.starts[line] if line < len(self.starts) else len(self.raw)

    def line_end(self, offset: int) -> int:
        """Offset at which the line of `offset` ends, its newline not included."""
        match = NEWLINE.search(self.raw, offset)
        return match.start() if match else len(self.raw)

    def indent(self, offset: int) -> bytes:
        """White space at the start of the line of `offset`."""
        head = self.raw[self.line_start(offset) : offset]
        return head[: len(head) - len(head.lstrip())]

    def begins_line(self, offset: int) -> bool:
        """Whether only white space stands before `offset` on its line."""
        return not self.raw[self.line_start(offset) : offset].strip()

    def ends_line(self, offset: int) -> bool:
        """Whether only white space or a comment stands after `offset` on its line."""
        rest = self.raw[offset : self.line_end(offset)].strip()
        return not rest or rest.startswith(b"#")

    def above_comments(self, offset: int) -> int:
        """Start of the comment block that belongs to the statement at `offset`, or of its line."""
        mark = self.raw[self.line_start(offset) : offset] + b"#"
        line = self.line_number(offset) - 1
        while line > 0 and self.raw.startswith(mark, self.starts[line - 1]):
            line -= 1
        return self.starts[line]

    def lines_of(self, span: Span) -> list[str]:
        """The lines that a span touches, stripped, empty ones left out."""
        last = max(span.start, span.end - 1)
        block = self.raw[self.line_start(span.start) : self.line_end(last)].decode()
        return [line.strip() for line in block.splitlines() if line.strip()]

    # scopes --------------------------------------------------------------------------------

    def scope(self, dotted: str) -> Definition:
        """The class or function named `dotted`; raise `Misfit` (no-scope) when not just one is."""
        return self._whole(self.heads(dotted)[-1])

    def heads(self, dotted: str) -> list[Definition]:
        """The definitions that `dotted` names, outermost first; bodies may be left out."""
        found: list[Definition] = []
        parts = dotted.split(".")
        for depth, part in enumerate(parts):
            children = self.definitions(found[-1] if found else self.outline)
            hits = children.get(part, [])
            if len(hits) != 1:
                raise Misfit(Kind.NO_SCOPE, *self._no_scope(parts[: depth + 1], hits, children))
            found += hits
        return found

    def _no_scope(self, seen: list[str], hits: list[Definition], names: Iterable[str]) -> list[str]:
        name = ".".join(seen)
        if hits:
            lines = ", ".join(str(self.line_of(hit)) for hit in hits)
            return [f"{name} is defined {len(hits)} times in {self.path} (lines {lines})"]
        near = difflib.get_close_matches(seen[-1], names, 3)
        close = [f"names close to it: {', '.join(near)}"] if near else []
        return [f"no {name} in {self.path}", *close]

    def definitions(self, scope: Scope) -> dict[str, list[Definition]]:
        """Classes and functions of a scope by name; those in its blocks too."""
        found = self._definitions.get(id(scope))
        if found is None:
            found = self._definitions[id(scope)] = {}
            if isinstance(scope, Function):
                self._whole(scope)
            for definition in _definitions_in(scope):
                found.setdefault(definition.name, []).append(definition)
        return found

    def nodes(self, root: ast.AST, kind: type[ast.AST]) -> list[ast.AST]:
        """Nodes of one kind below `root`, in source order.

        Not those in f-strings, whose positions are unreliable before Python 3.12.
        """
        return self._index(root).get(kind, [])

    def suites(self, root: ast.AST) -> list[list[ast.stmt]]:
        """Every list of statements in and below `root`."""
        kinds = self._index(root).items()
        owners = [node for kind, nodes in kinds if SUITES & {*kind._fields} for node in nodes]
        fields = (getattr(node, field, None) for node in (root, *owners) for field in SUITES)
        return [field for field in fields if isinstance(field, list)]

    def _index(self, root: ast.AST) -> dict[type[ast.AST], list[ast.AST]]:
        known = self._nodes.get(id(root))
        if known is None:
            found: dict[type[ast.AST], list[ast.AST]] = {}
            for node in walk(self._whole(root)):
                found.setdefault(type(node), []).append(node)
            known = self._nodes[id(root)] = (root, found)  # a root that is kept keeps its id
        return known[1]

    def every_node(self, root: ast.AST) -> Iterator[ast.AST]:
        """All nodes below `root`, by kind."""
        return itertools.chain.from_iterable(self._index(root).values())

    @functools.cached_property
    def bindings(self) -> dict[str, int]:
        """What the module binds while it is imported, with the offset of the first binding.

        What stands under `if TYPE_CHECKING:` is not bound; `*` stands for all that an import
        brings.
        """
        found: dict[str, int] = {}
        for name, line in bound_at_import(self.outline.body):
            found.setdefault(name, self.places[line - 1])
        return found

    def mentions(self, name: str) -> bool:
        """Whether a name stands anywhere in the file, be it code or not."""
        return re.search(rb"\b%s\b" % name.encode(), self.raw) is not None

    def statements_with(self, word: str) -> Iterator[tuple[str, ast.stmt]]:
        """Top-level statements and class members whose text has `word`, with a name for each."""
        text = word.encode()
        for outer in self.outline.body:
            for inner in outer.body if isinstance(outer, ast.ClassDef) else [outer]:
                if self.raw.find(text, self.statement_start(inner), self.span(inner).end) >= 0:
                    names = dict.fromkeys(getattr(node, "name", "") for node in (outer, inner))
                    yield ".".join(filter(None, names)) or "the module", self._whole(inner)

    # splicing ------------------------------------------------------------------------------

    def splice(self, splices: Iterable[Splice]) -> tuple[bytes, list[Span]]:
        """Lay `splices` over the source; those at one place keep their order.

        Returns the new content and, in the order given, the span of each splice in it (counted
        as in a `Source` of it). Raises `Misfit` (overlap) when two touch the same bytes.
        """
        given = list(splices)
        order = sorted(range(len(given)), key=lambda index: given[index].span)
        pieces, spans, last, size = [self.bom], [Span(0, 0)] * len(given), 0, 0
        for index in order:
            (start, end), text = given[index]
            if start < last:
                place = f"{self.path}:{self.line_number(start)}"
                raise Misfit(Kind.OVERLAP, f"{place}: two seams of one patch edit the same place")
            pieces += [self.raw[last:start], text]
            size += start - last
            spans[index] = Span(size, size + len(text))
            size += len(text)
            last = end
        return b"".join([*pieces, self.raw[last:]]), spans


def _definitions_in(root: ast.AST) -> Iterator[Definition]:
    for field in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(root, field, ()):
            if isinstance(child, Definition):
                yield child
            else:
                yield from _definitions_in(child)


def walk(root: ast.AST) -> Iterator[ast.AST]:
    """Nodes below `root`, parents first; not those in f-strings."""
    stack = [*ast.iter_child_nodes(root)][::-1]
    while stack:
        node = stack.pop()
        if not isinstance(node, ast.JoinedStr):
            yield node
            if type(node) not in LEAVES:
                stack += [*ast.iter_child_nodes(node)][::-1]
