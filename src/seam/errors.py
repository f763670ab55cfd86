# SPDX-License-Identifier: Apache-2.0
"""What `seam` tells its user when something cannot be done."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any


class SeamError(Exception):
    """Bad input or a broken surrounding: says what was wrong, where, and what to do."""


class Kind(str, Enum):
    """Why a seam does not fit a release."""

    AMBIGUOUS = "ambiguous"
    BAD_PATTERN = "bad-pattern"
    BAD_PLACE = "bad-place"
    BROKEN = "broken"
    EXISTS = "exists"
    LEFT_OVER = "left-over"
    NEEDS = "needs"
    NO_ANCHOR = "no-anchor"
    NO_FILE = "no-file"
    NO_MODULE = "no-module"
    NO_SCOPE = "no-scope"
    OVERLAP = "overlap"
    UNBOUND = "unbound"


class Misfit(SeamError):
    """A seam that does not fit: the kind, a headline, and lines that help to mend it."""

    def __init__(
        self,
        kind: Kind,
        headline: str,
        *help_lines: str,
        line: int = 0,
        explain: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """`explain` finds more lines of help; it is asked only when somebody is told."""
        super().__init__(headline)
        self.kind = kind
        self.headline = headline
        self.line = line
        """Line of the seam file that asked for it; 0 when the whole patch did."""
        self._help = help_lines
        self._explain = explain

    @functools.cached_property
    def lines(self) -> tuple[str, ...]:
        """The headline and all lines of help."""
        return (self.headline, *self._help, *self._explain())

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def report(self, patch: str, release: str, *more: str) -> str:
        """Where, on which release, and all lines indented below."""
        place = f"{patch}.seam:{self.line}" if self.line else f"{patch}.seam"
        told = "\n".join((*self.lines, *more)).replace("\n", "\n  ")
        return f"{place} on {release}: {self.kind.value}\n  {told}"

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is otherwise rebuilt from its text alone when it comes from another process.
        return _rebuild, (self.kind, self.lines, self.line)


def _rebuild(kind: Kind, lines: tuple[str, ...], line: int) -> Misfit:
    return Misfit(kind, *lines, line=line)
