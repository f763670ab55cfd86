# SPDX-License-Identifier: Apache-2.0
"""Spoils metadata rows between commit and reading, to see whether anybody notices.

No model: SGLang imports this package in every scheduler, and `PDLAB_ROW_FAULT=FIELD:N` then flips a
bit of FIELD in the row of every N-th request that decode commits. Nothing happens without it.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

FAULT = "PDLAB_ROW_FAULT"


def install(fault: str) -> None:
    """Spoil rows as `fault` says, right after they pass to their requests."""
    import torch
    from sglang.srt.disaggregation import metadata_slots

    field, _, every = fault.partition(":")
    numbers = itertools.count(1)
    hand_over = metadata_slots.hand_over

    def spoiled(req: Any, spec_algorithm: Any) -> None:
        hand_over(req, spec_algorithm)
        if next(numbers) % int(every or 1) == 0:
            slot = req.metadata_slot
            getattr(slot.pool.buffers, field)[slot.index].view(torch.uint8)[0] ^= 1
            print(f"row fault: {field} of {req.rid!r} in row {slot.index}", flush=True)

    metadata_slots.hand_over = spoiled


if fault := os.environ.get(FAULT):
    install(fault)
