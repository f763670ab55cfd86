# SPDX-License-Identifier: Apache-2.0
"""What can be said of the series without any release: headers, owners, names of files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from seam.seamfile import ADDABLE, Patch
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


def lint(series: Series) -> list[str]:
    """Everything that is wrong with the series, one line each, sorted by patch."""
    found = [line for patch in series.patches for line in _header(patch)]
    found += [line for patch in series.patches for line in _files(series, patch)]
    return [*found, *_owners(series), *_unlisted(series)]


def _header(patch: Patch) -> Iterator[str]:
    file = f"{patch.name}.seam"
    if not SUBJECT.fullmatch(patch.subject) or len(patch.subject) > SUBJECT_LIMIT:
        yield (
            f"{file}:1: want a subject 'area: what it does', at most {SUBJECT_LIMIT} characters, "
            "no full stop"
        )
    paragraphs = patch.message.strip().split("\n\n")
    if len(paragraphs) < 3:
        yield f"{file}:1: say why, in a paragraph between the subject and the trailers"
    for trailer in patch.trailers:
        choices = CHOICES.get(trailer.key)
        if trailer.key not in KNOWN:
            yield f"{file}:{trailer.line}: unknown trailer {trailer.key}; known: {', '.join(KNOWN)}"
        elif choices and trailer.value not in choices:
            yield f"{file}:{trailer.line}: {trailer.key} is one of {', '.join(choices)}"
        elif trailer.key == "Rejected" and " | " not in trailer.value:
            yield f"{file}:{trailer.line}: want 'Rejected: alternative | reason'"
    yield from unfilled(patch)
    for key in REQUIRED:
        if not patch.trailer(key):
            yield f"{file}: no trailer {key}"


def _files(series: Series, patch: Patch) -> Iterator[str]:
    for path in patch.adds:
        if not (series.root / path).is_file():
            yield f"{patch.name}.seam: adds {path}, which does not exist"
    for trailer in patch.trailers:
        for path in TEST_PATH.findall(trailer.value):
            if not (series.root / path).is_file():
                yield f"{patch.name}.seam:{trailer.line}: names {path}, which does not exist"


def _owners(series: Series) -> Iterator[str]:
    owners: dict[str, list[str]] = {}
    for patch in series.patches:
        for path in patch.adds:
            owners.setdefault(path, []).append(patch.name)
    for path, names in owners.items():
        if len(names) > 1:
            yield f"{path}: added by more than one patch: {', '.join(names)}"
    for folder in ADDABLE:
        for file in sorted((series.root / folder).rglob("*")):
            path = file.relative_to(series.root).as_posix()
            if file.is_file() and file.suffix != ".pyc" and path not in owners:
                yield f"{path}: no patch adds it"


def _unlisted(series: Series) -> Iterator[str]:
    names = {patch.name for patch in series.patches}
    for file in sorted((series.root / "series").glob("*.seam")):
        if file.stem not in names:
            yield f"series/{Path(file).name}: not listed in series/series"
