# SPDX-License-Identifier: Apache-2.0
"""Turns handoff digests off and on in servers that run, and times them, to see what they cost.

No model: SGLang imports this package in every scheduler, and `PDLAB_DIGEST_SWITCH=FILE` then has
both ends share FILE, in the servers' TMPDIR, with whoever measures. Nothing happens without it.
"""

from __future__ import annotations

import functools
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SWITCH = "PDLAB_DIGEST_SWITCH"
PER_CENT, SIGNING_NS, CHECKING_NS = range(3)
"""Words of the file: share of the requests that is checked, 0 for digests off; nanoseconds of
processor time that prefill has spent on signing, and decode on checking."""
WORDS = 3


class Board:
    """The shared file; made by whoever comes first."""

    def __init__(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, 8 * WORDS)
        self.words = memoryview(mmap.mmap(file, 8 * WORDS)).cast("q")
        os.close(file)


def install(name: str) -> None:
    """Obey the switch, which may be turned while both ends are at rest, and time what it turns."""
    from sglang.srt.disaggregation import handoff_digest

    known = handoff_digest.of

    @functools.cache  # in the process that serves, not in the one that it is copied from
    def board() -> Board:
        return Board(Path(os.environ["TMPDIR"], name))

    def switched(buffers: Any) -> Any:
        share = board().words[PER_CENT]
        digests = known(buffers) if share else None
        if digests is not None:
            digests._threshold = share * 2**32 // 100
        return digests

    def timed(word: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def spent(*args: Any) -> Any:
            start = time.thread_time_ns()
            try:
                return call(*args)
            finally:
                board().words[word] += time.thread_time_ns() - start

        return spent

    handoff_digest.of = switched
    sign = timed(SIGNING_NS, handoff_digest.Digests.sign)
    handoff_digest.Digests.sign = sign  # type: ignore[method-assign]
    for step in ("commit", "consume"):
        setattr(handoff_digest, step, timed(CHECKING_NS, getattr(handoff_digest, step)))


if file := os.environ.get(SWITCH):
    install(file)
