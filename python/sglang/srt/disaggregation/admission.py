# SPDX-License-Identifier: Apache-2.0
"""How many tokens decode keeps free for a request that it admits or resumes.

    |<------------- held ------------->|<--- reserve --->|
    |  prompt (and what was decoded)   |                 |
    0                                  held              end = prompt + max_new_tokens, whole pages

Stock keeps the same number free whatever the request can still generate. A request for which
`held` plus that number is more than the pool waits for ever, at the head of a queue that goes in
order. What fits when nothing else is there has to be admitted when nothing else is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.managers.schedule_batch import Req


def reserve(queue: DecodePreallocQueue, req: Req, held: int) -> int:
    """Tokens to keep free beyond the `held` ones, at most what the request can still take.

    `held`: all tokens the request will have slots for at once, cached prefix included. Never more
    than the server's setting, nor than the pool has beyond `held`: a pool that is empty but for
    this request admits it.
    """
    page = queue.token_to_kv_pool_allocator.page_size
    end = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
    growth = -(-end // page) * page - held
    spare = queue.max_total_num_tokens // page * page - held
    kept: int = max(0, min(queue.num_reserved_decode_tokens, growth, spare))
    return kept
