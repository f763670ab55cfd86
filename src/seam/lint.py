# SPDX-License-Identifier: Apache-2.0
"""What can be said of the series without any release: headers, anchors, owners of files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from seam.borrowed import borrowed
from seam.faults import Fault, seam_path
from seam.pattern import Pattern, has_comment
from seam.seamfile import ADDABLE, Op, Patch
from seam.series import Series
from seam.skeleton import unfilled

SUBJECT = re.compile(r"[a-z0-9][a-z0-9_./-]*: \S.*[^.\s]")
SUBJECT_LIMIT = 72
CHOICES = {
    "Confidence": ("high", "medium", "low"),
    "Scope-risk": ("narrow", "moderate", "wide"),
}
REQUIRED = ("Confidence", "Scope-risk", "Directive", "Upstream", "Tested")
KNOWN = (*REQUIRED, "Constraint", "Rejected", "Not-tested")
TEST_PATH = re.compile(r"\btest/[\w./-]+\.py\b")


def lint(series: Series) -> list[Fault]:
    """Everything that is wrong with the series, by patch in order of application."""
    found: list[Fault] = []
    for patch in series.patches:
        found += [*_header(patch), *_files(series, patch)]
    found += lint_seams(series.patches)
    return [*found, *borrowed(series), *_owners(series), *_unlisted(series)]


def _header(patch: Patch) -> Iterator[Fault]:
    path = seam_path(patch.name)
    if not SUBJECT.fullmatch(patch.subject) or len(patch.subject) > SUBJECT_LIMIT:
        limit = f"at most {SUBJECT_LIMIT} characters, no full stop"
        yield Fault(path, 1, f"want a subject 'area: what it does', {limit}")
    if len(patch.message.strip().split("\n\n")) < 3:
        yield Fault(path, 1, "say why, in a paragraph between the subject and the trailers")
    for trailer in patch.trailers:
        choices = CHOICES.get(trailer.key)
        if trailer.key not in KNOWN:
            reason = f"unknown trailer {trailer.key}; known: {', '.join(KNOWN)}"
            yield Fault(path, trailer.line, reason)
        elif choices and trailer.value not in choices:
            yield Fault(path, trailer.line, f"{trailer.key} is one of {', '.join(choices)}")
        elif trailer.key == "Rejected" and " | " not in trailer.value:
            yield Fault(path, trailer.line, "want 'Rejected: alternative | reason'")
    yield from unfilled(patch)
    for key in REQUIRED:
        if not patch.trailer(key):
            yield Fault(path, 0, f"no trailer {key}")


def _files(series: Series, patch: Patch) -> Iterator[Fault]:
    path = seam_path(patch.name)
    for added in patch.adds:
        if not (series.root / added).is_file():
            yield Fault(path, 0, f"adds {added}, which does not exist")
    for trailer in patch.trailers:
        for test in TEST_PATH.findall(trailer.value):
            if not (series.root / test).is_file():
                yield Fault(path, trailer.line, f"names {test}, which does not exist")


# seams -------------------------------------------------------------------------------------------


def lint_seams(patches: Sequence[Patch]) -> Iterator[Fault]:
    """Anchors that will not last, and imports that will grow."""
    ours = {path for patch in patches for path in patch.adds}
    for patch in patches:
        for seam in patch.seams:
            anchors = (seam.anchor, *seam.inside, *seam.cures)
            reasons = [_leans_on_text(anchor) for anchor in anchors if anchor]
            reasons += [_takes_names(node, ours) for node in seam.put.body if seam.op is Op.IMPORT]
            for reason in filter(None, reasons):
                yield Fault(seam_path(patch.name), seam.line, reason)


def _leans_on_text(anchor: Pattern) -> str | None:
    """Why an anchor reads more of the text than its shape, or would seem to."""
    shown = f"the anchor {anchor.text!r}"
    if has_comment(anchor.text):
        return f"{shown} holds a comment, which is never read"
    if anchor.text.endswith((";", ",")) or "\\\n" in anchor.text:
        return f"{shown} ends like a line that goes on, which is never read"
    for node in ast.walk(anchor.node):
        if isinstance(node, ast.JoinedStr):
            return f"{shown} holds an f-string, whose wording changes; leave it open: $_"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            return f"{shown} holds words for people, which change; leave them open: $_"
    return None


def _takes_names(node: ast.stmt, ours: set[str]) -> str | None:
    """Why an import of names from a module of ours should be one of the module."""
    module = node.module if isinstance(node, ast.ImportFrom) else None
    if module and f"python/{module.replace('.', '/')}.py" in ours:
        return f"import {module} itself and call through it, so that this line never grows"
    return None


# owners ------------------------------------------------------------------------------------------


def _owners(series: Series) -> Iterator[Fault]:
    owners: dict[str, list[str]] = {}
    for patch in series.patches:
        for path in patch.adds:
            owners.setdefault(path, []).append(patch.name)
    for path, names in owners.items():
        if len(names) > 1:
            yield Fault(path, 0, f"added by more than one patch: {', '.join(names)}")
    for folder in ADDABLE:
        for file in sorted((series.root / folder).rglob("*")):
            path = file.relative_to(series.root).as_posix()
            if file.is_file() and file.suffix != ".pyc" and path not in owners:
                yield Fault(path, 0, "no patch adds it")


def _unlisted(series: Series) -> Iterator[Fault]:
    names = {patch.name for patch in series.patches}
    for file in sorted((series.root / "series").glob("*.seam")):
        if file.stem not in names:
            yield Fault(f"series/{file.name}", 0, "not listed in series/series")
