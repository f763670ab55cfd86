# SPDX-License-Identifier: Apache-2.0
"""What the lab is doing, said while it does it: a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


class Progress:
    """Steps go to standard error, so that standard output holds results alone."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.started = time.monotonic()

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Name what runs inside; when it is done, say how long it took."""
        start = time.monotonic()
        if self.console.is_terminal:
            with self.console.status(text):
                yield
        else:
            yield
        self.say(f"{text}  [dim]{time.monotonic() - start:.1f} s[/]")

    def say(self, text: str) -> None:
        """One line, with the time since the start ahead of it."""
        elapsed = time.monotonic() - self.started
        self.console.print(f"[dim]{elapsed:6.1f}[/] {text}", soft_wrap=True)
