# SPDX-License-Identifier: Apache-2.0
"""Several answers to one prompt (`n`) through a pair: each sample is a transfer of its own.

Both halves expand the same request by themselves, so what one derives the other has to derive too.
"""

from __future__ import annotations

import copy
import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

FAKE_HOST = "2.2.2.2"
"""disaggregation/utils.py: FAKE_BOOTSTRAP_HOST, of requests that transfer nothing."""
ROOM_BITS, RANK_BITS = 63, 16


def next_room(room: int) -> int:
    """The room of the sample after the one in `room`: the same on both halves, never 0.

    Its low bits are those of `room`. A data-parallel prefill takes its rank from the room modulo
    its size, so that for powers of two all samples go where the prompt is cached already.
    """
    digest = hashlib.blake2b(room.to_bytes(8, "little"), digest_size=8).digest()
    high = int.from_bytes(digest, "little") >> (64 - ROOM_BITS + RANK_BITS) or 1
    return high << RANK_BITS | room & (1 << RANK_BITS) - 1


def sample(manager: TokenizerManager, tokenized: Any) -> Any:
    """A copy of `tokenized` in a room of its own; `tokenized` is left with the next one's."""
    own = copy.copy(tokenized)
    is_half = manager.disaggregation_mode.value != "null"
    if is_half and tokenized.bootstrap_room is not None:
        tokenized.bootstrap_room = next_room(tokenized.bootstrap_room)
    return own


def warms_up(manager: TokenizerManager, tokenized: Any) -> bool:
    """Whether the request that puts the prompt of `tokenized` into the cache is sent at all.

    Prefill caches the prompt once for all samples and transfers nothing for that. On decode there
    is nothing to cache: the KV of each sample comes from prefill.
    """
    mode = manager.disaggregation_mode.value
    if mode == "prefill":
        tokenized.bootstrap_host = FAKE_HOST
    return bool(mode != "decode")


def caches_prompt(req: Req) -> None:
    """Let a warm-up in a room keep its KV in prefill's cache, where it was computed for real.

    Stock keeps nothing of a request with the fake host; probes, which have no room, stay that way.
    """
    if req.bootstrap_host == FAKE_HOST and req.bootstrap_room:
        req.skip_radix_cache_insert = False
