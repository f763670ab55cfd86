# SPDX-License-Identifier: Apache-2.0
"""Python with holes: `$x` one node, `$*x` any run of arguments or items, `$_` and `$*_` unnamed."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from seam.bindings import names_bound_by
from seam.errors import Kind, Misfit
from seam.source import Source

# A string or a comment is taken whole, so that a dollar sign in it is no hole.
TOKEN = re.compile(
    r"""(?P<plain>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\#[^\n]*)"""
    r"""|\$(?P<many>\*?)(?P<name>[A-Za-z_]\w*)"""
)
ONE, MANY = "_hole1_", "_holeN_"
BODY_FIELDS = frozenset({"body", "orelse", "handlers", "finalbody"})
HEAD_FIELDS = BODY_FIELDS | {"decorator_list", "type_params"}
UNREAD_FIELDS = frozenset({"ctx", "type_comment", "kind"})

Bound: TypeAlias = "ast.AST | str | list[ast.AST]"
Bindings: TypeAlias = dict[str, Bound]


class Hole(NamedTuple):
    """A place of a pattern that anything may fill."""

    name: str
    many: bool


@dataclass(frozen=True)
class Pattern:
    """One expression or one statement to look for; a head (`if x:`) leaves the body open."""

    text: str
    node: ast.AST
    is_head: bool

    @property
    def names(self) -> frozenset[str]:
        """The named holes."""
        return hole_names(self.text)

    @property
    def rarest(self) -> str:
        """The longest word of it that is no hole; what reads like it must have that word."""
        text = TOKEN.sub(" ", self.text)
        words = re.findall(r"[A-Za-z_]\w*", text)
        return max(words, key=len, default="")


@dataclass(frozen=True)
class Replacement:
    """What the `+` lines of a seam say, as text and as syntax."""

    text: str
    body: tuple[ast.stmt, ...]
    is_head: bool = False

    @property
    def node(self) -> ast.AST | None:
        """The single expression or statement it is, if it is one."""
        if len(self.body) != 1:
            return None
        only = self.body[0]
        return only.value if isinstance(only, ast.Expr) else only

    @property
    def is_expression(self) -> bool:
        """Whether it can stand inside a larger expression."""
        return isinstance(self.node, ast.expr)

    @property
    def one_line(self) -> bool:
        """Whether it is written on one line."""
        return "\n" not in self.text


class Match(NamedTuple):
    """A node that reads like a pattern, and what its holes hold."""

    node: ast.AST
    bindings: Bindings


# text ----------------------------------------------------------------------------------------


def mangle(text: str) -> str:
    """Turn holes into names that Python can parse."""
    return TOKEN.sub(
        lambda match: match["plain"] or (MANY if match["many"] else ONE) + match["name"], text
    )


def hole_names(text: str) -> frozenset[str]:
    """The named holes of a text."""
    found = (match["name"] for match in TOKEN.finditer(text) if match["name"])
    return frozenset(name for name in found if name != "_")


def has_comment(text: str) -> bool:
    """Whether a text that parses holds a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(mangle(text) + "\n").readline)
    return any(token.type == tokenize.COMMENT for token in tokens)


def compile_pattern(text: str) -> Pattern:
    """Parse an anchor; raise `Misfit` (bad-pattern) when it is not one expression or statement."""
    text = text.strip()
    is_head = text.endswith(":")
    body = _parse(text, text + _open_body(text) if is_head else text)
    if len(body) != 1:
        raise Misfit(
            Kind.BAD_PATTERN, f"an anchor is one expression or one statement, not: {text!r}"
        )
    node: ast.AST = body[0].value if isinstance(body[0], ast.Expr) else body[0]
    if hole_of(node):
        raise Misfit(Kind.BAD_PATTERN, f"a bare hole reads like anything: {text!r}")
    _refuse_stray_runs(node, text)
    return Pattern(text, node, is_head)


def compile_replacement(text: str, is_head: bool = False, comments: bool = False) -> Replacement:
    """Parse `+` lines; raise `Misfit` (bad-pattern) when they are not Python or say nothing.

    With `comments` an expression may have some: it stands on lines of its own.
    """
    text = text.strip("\n").rstrip()
    if text.startswith("@"):
        body = _parse(text, text + "\ndef decorated(): ...")
    else:
        body = _parse(text, text + _open_body(text) if is_head else text)
    replacement = Replacement(text, tuple(body), is_head)
    if not body:
        raise Misfit(Kind.BAD_PATTERN, f"'+' lines hold no statement: {text!r}")
    if replacement.node is not None and hole_of(replacement.node):
        raise Misfit(
            Kind.BAD_PATTERN,
            f"a replacement that is a bare hole reads like anything: {text!r}",
            "keep more of the expression on both sides",
        )
    if replacement.is_expression and not comments and has_comment(text):
        raise Misfit(Kind.BAD_PATTERN, f"a comment cannot stand in an expression: {text!r}")
    return replacement


def _open_body(head: str) -> str:
    return " ...\nfinally: ..." if head == "try:" else " ..."


def _parse(shown: str, text: str) -> list[ast.stmt]:
    try:
        return ast.parse(mangle(text)).body
    except SyntaxError as error:
        raise Misfit(Kind.BAD_PATTERN, f"not Python: {shown!r}: {error.msg}") from error
    except ValueError as error:  # a zero byte, before Python 3.12
        raise Misfit(Kind.BAD_PATTERN, f"not Python: {shown!r}: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise Misfit(Kind.BAD_PATTERN, f"nested too deep: {shown[:40]!r}…") from error


def _refuse_stray_runs(root: ast.AST, text: str) -> None:
    for node in ast.walk(root):
        if isinstance(node, (ast.Name, ast.arg)):
            continue
        for name, value in ast.iter_fields(node):
            hole = None if isinstance(value, list) else hole_of(value)
            if hole and hole.many and not (isinstance(node, ast.Expr) and name == "value"):
                raise Misfit(
                    Kind.BAD_PATTERN, f"$*{hole.name} stands where one node must: {text!r}"
                )


def used_names(put: Replacement) -> frozenset[str]:
    """The names a replacement reads, holes left out."""
    return frozenset(
        node.id
        for statement in put.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and not hole_of(node)
    )


def bound_names(put: Replacement) -> frozenset[str]:
    """The names a replacement binds, imports and inner definitions among them."""
    return names_bound_by(node for statement in put.body for node in ast.walk(statement))


# matching ------------------------------------------------------------------------------------


def hole_of(item: object) -> Hole | None:
    """The hole that a pattern node, or a name in it, stands for."""
    if isinstance(item, ast.Expr):
        item = item.value
    if isinstance(item, ast.Name):
        item = item.id
    elif isinstance(item, ast.arg) and item.annotation is None:
        item = item.arg
    if not isinstance(item, str):
        return None
    if item.startswith(ONE):
        return Hole(item[len(ONE) :], many=False)
    if item.startswith(MANY):
        return Hole(item[len(MANY) :], many=True)
    return None


def match(pattern: Pattern, node: ast.AST, known: Bindings | None = None) -> Bindings | None:
    """What the holes hold when `node` reads like `pattern`, else None."""
    if type(node) is not type(pattern.node):
        return None
    bindings = dict(known or {})
    if not pattern.is_head:
        return bindings if same(pattern.node, node, bindings) else None
    for field in pattern.node._fields:
        wanted = getattr(pattern.node, field, None)
        open_returns = field == "returns" and wanted is None
        if field in HEAD_FIELDS or field in UNREAD_FIELDS or open_returns:
            continue
        if not same(wanted, getattr(node, field, None), bindings):
            return None
    return bindings


def find(
    pattern: Pattern, source: Source, root: ast.AST, known: Bindings | None = None
) -> Iterator[Match]:
    """All nodes below `root` that read like `pattern`, in source order."""
    for node in source.nodes(root, type(pattern.node)):
        bindings = match(pattern, node, known)
        if bindings is not None:
            yield Match(node, bindings)


def same(pattern: object, target: object, bindings: Bindings) -> bool:
    """Whether `target` reads like `pattern`; fills `bindings`, which a failure leaves unusable."""
    hole = hole_of(pattern)
    if hole and not hole.many:
        return _bind_one(hole.name, target, bindings)
    if isinstance(pattern, ast.AST):
        if type(pattern) is not type(target):
            return False
        if isinstance(pattern, ast.Call) and isinstance(target, ast.Call):
            return _same_call(pattern, target, bindings)
        if isinstance(pattern, ast.arguments) and isinstance(target, ast.arguments):
            return _same_parameters(pattern, target, bindings)
        return _same_fields(pattern, target, bindings)
    if isinstance(pattern, list):
        return isinstance(target, list) and _same_items(pattern, target, bindings)
    return type(pattern) is type(target) and pattern == target


def _bind_one(name: str, target: object, bindings: Bindings) -> bool:
    if not isinstance(target, (ast.AST, str)):
        return False
    if name == "_":
        return True
    held = bindings.setdefault(name, target)
    return held is target or reads_alike(held, target)


def _bind_run(hole: Hole, run: list[Any], bindings: Bindings) -> bool:
    if hole.name == "_":
        return True
    held = bindings.setdefault(hole.name, run)
    return held is run or (
        isinstance(held, list)
        and len(held) == len(run)
        and all(reads_alike(old, new) for old, new in zip(held, run, strict=True))
    )


def reads_alike(one: object, other: object) -> bool:
    """Whether two pieces of syntax say the same, positions and load or store aside."""
    return type(one) is type(other) and same(one, other, {})


def _same_fields(pattern: ast.AST, target: ast.AST | object, bindings: Bindings) -> bool:
    return all(
        same(getattr(pattern, field, None), getattr(target, field, None), bindings)
        for field in pattern._fields
        if field not in UNREAD_FIELDS
    )


def _same_items(pattern: list[Any], target: list[Any], bindings: Bindings) -> bool:
    runs = [(at, hole) for at, item in enumerate(pattern) if (hole := hole_of(item)) and hole.many]
    if not runs:
        return len(pattern) == len(target) and all(
            same(item, other, bindings) for item, other in zip(pattern, target, strict=True)
        )
    at, hole = runs[0]
    after = len(pattern) - at - 1
    if len(runs) > 1 or len(target) < at + after:
        return False
    split = len(target) - after
    return (
        _same_items(pattern[:at], target[:at], bindings)
        and _same_items(pattern[at + 1 :], target[split:], bindings)
        and _bind_run(hole, target[at:split], bindings)
    )


def _same_call(pattern: ast.Call, target: ast.Call, bindings: Bindings) -> bool:
    """Arguments by place, keywords by name; a run takes the keywords that are not named too."""
    if not same(pattern.func, target.func, bindings):
        return False
    open_keywords = list(target.keywords)
    for wanted in pattern.keywords:
        hit = next((given for given in open_keywords if given.arg == wanted.arg), None)
        if hit is None or not same(wanted.value, hit.value, bindings):
            return False
        open_keywords.remove(hit)
    run = next((item for item in pattern.args if (hole := hole_of(item)) and hole.many), None)
    if run is None:
        return not open_keywords and _same_items(pattern.args, target.args, bindings)
    return _same_items(pattern.args, _with_keywords(pattern, target, open_keywords), bindings)


def _with_keywords(
    pattern: ast.Call, target: ast.Call, keywords: list[ast.keyword]
) -> list[ast.AST]:
    """The target's arguments, its open keywords put where the run of the pattern ends."""
    run_at = next(at for at, item in enumerate(pattern.args) if (h := hole_of(item)) and h.many)
    split = max(len(target.args) - (len(pattern.args) - run_at - 1), 0)
    return [*target.args[:split], *keywords, *target.args[split:]]


def _same_parameters(pattern: ast.arguments, target: ast.arguments, bindings: Bindings) -> bool:
    """Parameters of a definition; a run at the end leaves all that follow open."""
    last = hole_of(pattern.args[-1]) if pattern.args else None
    if not (last and last.many):
        return _same_fields(pattern, target, bindings)
    named = pattern.args[:-1]
    return len(target.args) >= len(named) and _same_items(
        list(named), target.args[: len(named)], bindings
    )
