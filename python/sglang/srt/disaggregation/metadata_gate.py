# SPDX-License-Identifier: Apache-2.0
"""Holds a finished transfer back until its metadata row has arrived, before the ranks vote on it.

From 0.5.13 on SGLang does this itself (utils.py, _apply_metadata_gate).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest


@dataclass(frozen=True, slots=True)
class GatedReceiver:
    """A queue entry's receiver as the vote sees it."""

    decode_req: DecodeRequest

    def poll(self) -> int:
        return poll(self.decode_req)


def pollers(queue: list[DecodeRequest]) -> list[GatedReceiver]:
    """What to poll for the entries of the transfer queue, in its order."""
    return [GatedReceiver(decode_req) for decode_req in queue]


def poll(decode_req: DecodeRequest) -> int:
    """The receiver's KVPoll value, but Transferring instead of Success while its row is unwritten.

    KV pages and metadata may travel on different connections. The ranks take the smallest value, so
    none of them commits before the row of each has arrived.
    """
    from sglang.srt.disaggregation.base import KVPoll

    state = int(decode_req.kv_receiver.poll())
    if state == int(KVPoll.Success) and not _row_arrived(decode_req):
        return int(KVPoll.Transferring)
    return state


def _row_arrived(decode_req: DecodeRequest) -> bool:
    from sglang.srt.disaggregation.fake import FakeKVReceiver

    if isinstance(decode_req.kv_receiver, FakeKVReceiver):
        return True
    slot = decode_req.req.metadata_slot
    return bool(slot.pool.buffers.bootstrap_room[slot.index, 0].item())
