# SPDX-License-Identifier: Apache-2.0
"""Turns handoff digests off and on in servers that run, and times them, to see what they cost.

No model: SGLang imports this package in every scheduler, and `PDLAB_DIGEST_SWITCH=FILE` then has
both ends share FILE, in the servers' TMPDIR, with whoever measures. Nothing happens without it.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdlab.models.board import Board

SWITCH = "PDLAB_DIGEST_SWITCH"
PER_CENT, SIGNING_NS, CHECKING_NS = range(3)
"""Words of the file: share of the requests that is checked; nanoseconds of processor time that
prefill has spent on signing, and decode on checking."""
WORDS = 3
OFF, ABSENT = 0, -1
"""Instead of a share: digests off, and hooks skipped as if the series did not have them."""


def install(name: str) -> None:
    """Obey the switch at every step of a request, and time what it turns on."""
    from sglang.srt.disaggregation import handoff_digest
    from sglang.srt.disaggregation.utils import MetadataBuffers

    known = handoff_digest.of

    @functools.cache  # in the process that serves, not in the one that it is copied from
    def words() -> memoryview[int]:
        return Board(Path(os.environ["TMPDIR"], name), WORDS).words

    def switched(buffers: Any) -> Any:
        share = words()[PER_CENT]
        digests = known(buffers) if share != OFF else None
        if digests is not None:
            digests._threshold = share * 2**32 // 100
        return digests

    def skipped(call: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (instead if words()[PER_CENT] == ABSENT else call)(*args)

    def timed(word: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def spent(*args: Any) -> Any:
            if words()[PER_CENT] == OFF:
                return call(*args)
            start = time.thread_time_ns()
            try:
                return call(*args)
            finally:
                words()[word] += time.thread_time_ns() - start

        return spent

    handoff_digest.of = switched
    sign = timed(SIGNING_NS, handoff_digest.Digests.sign)
    handoff_digest.Digests.sign = sign  # type: ignore[method-assign]
    fill = MetadataBuffers.set_buf
    MetadataBuffers.set_buf = skipped(fill, fill.__wrapped__)
    for step in ("commit", "consume"):
        call = timed(CHECKING_NS, getattr(handoff_digest, step))
        setattr(handoff_digest, step, skipped(call, lambda *_: None))


if file := os.environ.get(SWITCH):
    install(file)
