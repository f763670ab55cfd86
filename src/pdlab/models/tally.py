# SPDX-License-Identifier: Apache-2.0
"""Counts the tokens that decode generates, pass by pass: throughput at any moment.

No model: SGLang imports this package in every scheduler, and `PDLAB_TALLY=FILE` then has it write
FILE in the servers' TMPDIR. Nothing happens without it.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

from pdlab.models.board import Board

SWITCH = "PDLAB_TALLY"
TOKENS, AT_NS = range(2)
"""Words of the file: tokens generated so far, and the monotonic time at which the last were."""
WORDS = 2


def install(name: str) -> None:
    """Count what each decode pass gave, as soon as its result was processed."""
    from sglang.srt.managers.scheduler import Scheduler

    process = Scheduler.process_batch_result

    @functools.cache  # in the process that serves, not in the one that it is copied from
    def board() -> Board:
        return Board(Path(os.environ["TMPDIR"], name), WORDS)

    def counted(scheduler: Any, batch: Any, result: Any, *args: Any, **more: Any) -> Any:
        size = len(batch.reqs) if batch.forward_mode.is_decode() else 0
        done = process(scheduler, batch, result, *args, **more)
        if size:
            words = board().words
            words[TOKENS] += result.get_num_generated_tokens(size)
            words[AT_NS] = time.monotonic_ns()
        return done

    Scheduler.process_batch_result = counted


if file := os.environ.get(SWITCH):
    install(file)
