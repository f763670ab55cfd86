# SPDX-License-Identifier: Apache-2.0
"""Finished transfers join the running batch even while retracted requests wait for memory.

They hold their pages already. Left in the queue they keep what the retracted ones wait for, can
neither run nor be retracted themselves, and nobody notices when one of them fails or is aborted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


def take_in(scheduler: Scheduler) -> None:
    """Take in what has arrived, before anything is resumed.

    Only while requests are retracted, when the pass ends before it would look at transfers; else
    it does so itself. The queue is equal on all ranks, so all of them look or none does.
    """
    if not scheduler.disagg_decode_prealloc_queue.retracted_queue:
        return
    arrived = scheduler.disagg_decode_transfer_queue.pop_transferred()
    if getattr(scheduler, "enable_hisparse", False):  # from 0.5.10 on
        for req in arrived:
            scheduler.hisparse_coordinator.admit_request_direct(req)
    scheduler.waiting_queue.extend(arrived)
