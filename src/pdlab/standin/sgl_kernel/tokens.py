# SPDX-License-Identifier: Apache-2.0
"""Token ids between draft and verify steps."""

import torch
from torch import Tensor

from ._ranges import ranges


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """The last accepted token of each request, which the next draft starts from.

    accept_tokens: [bs * accept_stride] ids; accept_lens: [bs], bonus token included.
    Writes `bonus_tokens` [bs]. Caller: kernels/ops/speculative/eagle.py, 0.5.16 to 0.5.23.
    """
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.view(-1)[last])


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each request's ids left by one and append its next token.

    input_ids: [tokens], request i's `extend_seq_lens[i]` ids starting at `extend_start_loc[i]`;
    topk_index: [bs] or [bs, topk], of which the first is taken; select_index: [bs] places for the
    next token instead of each request's last one. A request of no tokens is left alone. Writes
    `input_ids`. Caller: kernels/ops/speculative/multi_layer_eagle.py, 0.5.16 to 0.5.23.
    """
    last = extend_start_loc + extend_seq_lens - 1
    _, moved = ranges(extend_start_loc, torch.maximum(last, extend_start_loc))
    input_ids[moved] = input_ids[moved + 1]
    kept = extend_seq_lens > 0
    place = last if select_index is None else select_index
    newest = topk_index if topk_index.dim() == 1 else topk_index[:, 0]
    input_ids[place[kept].long()] = newest[kept].to(input_ids.dtype)
