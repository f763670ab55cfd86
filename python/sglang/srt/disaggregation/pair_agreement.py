# SPDX-License-Identifier: Apache-2.0
"""Both ends of a transfer have the same prompt, or the request fails and says how they differ.

Prefill writes a signature of its prompt into the metadata row, beside the room; the row is one
write, so whoever finds its room there finds the signature of the same prompt. Decode compares when
the transfer is finished, before anything of it is used.

    row of `MetadataBuffers.bootstrap_room`, 8 x 64 bits
    [0]  room; 0 while nothing is written
    [1]  prompt length << 32 | CRC-32 of the prompt; 0 from an end without this patch
"""

from __future__ import annotations

import logging
import zlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import KVPoll

if TYPE_CHECKING:
    import torch
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.utils import MetadataBuffers
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

FAKE_HOST = "2.2.2.2"
"""disaggregation/utils.py: FAKE_BOOTSTRAP_HOST; such a request has no other end."""
ROOM, PROMPT = 0, 1
"""Columns of a row."""
CRC_BITS = 32


def signature(req: Req) -> int:
    """Length and checksum of a prompt; the checksum is 0 where ends may write it differently.

    A multimodal prompt holds hashes of features, which depend on the device they were computed on.
    """
    ids = req.origin_input_ids
    foreign = getattr(req, "multimodal_inputs", None) is not None
    return len(ids) << CRC_BITS | (0 if foreign else zlib.crc32(_bytes(ids)))


def sign(rows: torch.Tensor, req: Req) -> None:
    """Prefill: put the signature of the prompt into the row of `req`, beside its room."""
    rows[req.metadata_buffer_index, PROMPT] = signature(req)


def compare(
    polls: list[int], entries: Sequence[DecodeRequest], buffers: MetadataBuffers | None
) -> None:
    """Decode: a finished transfer of another prompt counts as failed, in `polls`, before the vote.

    The vote takes the minimum over the ranks and failed is the lowest state, so all ranks fail the
    request even if only one of them received the other prompt.
    """
    if buffers is None:
        return
    for i, entry in enumerate(entries):
        if polls[i] != int(KVPoll.Success) or not _is_comparable(entry):
            continue
        row = buffers.bootstrap_room[entry.metadata_buffer_index]
        req = entry.req
        theirs = int(row[PROMPT].item())
        if int(row[ROOM].item()) != req.bootstrap_room or not theirs:
            continue
        reason = difference(theirs, signature(req))
        if reason is not None:
            entry.kv_receiver.kv_mgr.record_failure(req.bootstrap_room, reason)
            polls[i] = int(KVPoll.Failed)


def difference(prefill: int, decode: int) -> str | None:
    """How two signatures differ; None where they do not, as far as both say."""
    (their_length, their_sum), (our_length, our_sum) = _split(prefill), _split(decode)
    both_told = bool(their_sum and our_sum)
    if their_length == our_length and (not both_told or their_sum == our_sum):
        return None
    return (
        f"prefill has {their_length} prompt tokens (checksum {their_sum:08x}), decode has "
        f"{our_length} ({our_sum:08x}): give both the same tokenizer and chat template, and every "
        "request a room of its own"
    )


def _split(value: int) -> tuple[int, int]:
    return value >> CRC_BITS, value & (1 << CRC_BITS) - 1


def _is_comparable(entry: DecodeRequest) -> bool:
    """Whether prefill computes just the prompt of this request, and it is still wanted.

    After a retraction without backup it computes what was decoded as well; a request refused at
    entry holds a stub in place of its prompt.
    """
    req: Any = entry.req
    return not (
        req.bootstrap_host == FAKE_HOST
        or getattr(entry, "is_rebootstrap", False)
        or getattr(req, "to_finish", None)
        or req.finished_reason is not None
    )


def _bytes(ids: Sequence[int]) -> memoryview:
    """Token ids as 64-bit numbers; a list, up to 0.5.15, is copied into them."""
    if not (isinstance(ids, array) and ids.typecode == "q"):
        ids = array("q", ids)
    return memoryview(ids).cast("B")
