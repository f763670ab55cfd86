# SPDX-License-Identifier: Apache-2.0
"""Slots of the KV cache: the req_to_token table, the slots of drafts, and moving rows.

`req_to_token` is [requests, positions] of integer slots, `pool_len` its second size. Slots in one
dimension are packed request after request.
"""

import ctypes

import torch
from torch import Tensor

from ._ranges import ranges


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """A req_to_token table with a row per draft branch: the prefix, then that branch's own slots.

    The drafts of a request lie behind its prefix, branch after branch, `num_steps` slots each.
    Returns [bs * topk, pool_len] in req_to_token's dtype; row i * topk + t holds request i's prefix
    of seq_lens[i] slots and the slots of branch t after it; what follows is unspecified. Caller:
    `IntelAMXMultiStepDraftBackend` in srt/layers/attention/intel_amx_backend.py, 0.5.16 to 0.5.23.
    """
    rows = req_to_token[req_pool_indices]
    if topk == 1:
        return rows
    steps = torch.arange(num_steps)
    branch = torch.arange(topk)[:, None]
    start = seq_lens.long()[:, None, None]
    own = rows.gather(1, (start + branch * num_steps + steps).flatten(1))
    table = rows[:, None].repeat(1, topk, 1)
    table.scatter_(2, (start + steps).expand(-1, topk, -1), own.view(-1, topk, num_steps))
    return table.view(-1, pool_len)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write packed slots `out_cache_loc` to request i, positions start_offset[i] to end_offset[i].

    Writes `req_to_token`. Caller: srt/mem_cache/allocation.py, 0.5.16 to 0.5.23.
    """
    request, position = ranges(start_offset, end_offset)
    slots = out_cache_loc[: len(position)].to(req_to_token.dtype)
    req_to_token[req_pool_indices[request], position] = slots


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read the slots of request i, positions start_offset[i] to end_offset[i], packed.

    Writes the front of `out_cache_loc`. Callers: kernels/ops/speculative/cache_locs.py of 0.5.16 to
    0.5.23 and srt/speculative/spec_utils.py of 0.5.16 to 0.5.22.
    """
    request, position = ranges(start_offset, end_offset)
    slots = req_to_token[req_pool_indices[request], position]
    out_cache_loc[: len(position)] = slots.to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the `topk * num_steps` slots behind each request's prefix of seq_lens[i] tokens.

    Writes `out_cache_loc` [bs * topk * num_steps]. Callers: kernels/ops/speculative/cache_locs.py
    of 0.5.23, srt/speculative/eagle_worker_common.py of 0.5.16 to 0.5.22.
    """
    position = seq_lens.long()[:, None] + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices[:, None], position]
    out_cache_loc.copy_(slots.flatten())


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Read the slots of the accepted drafts: `out_cache_loc` at the indices that are not -1.

    accept_index: integers of any shape, read in order. Writes the front of `accept_out_cache_loc`.
    Caller: kernels/ops/speculative/eagle.py, 0.5.16 to 0.5.23.
    """
    accepted = accept_index[accept_index > -1]
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted.long()]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """In every buffer copy row src_loc[i] to row tgt_loc[i], all reads before all writes.

    data_ptrs: [buffers] addresses; strides: [buffers] bytes of a row; tgt_loc, src_loc: [n] rows.
    Caller: kernels/ops/kvcache/cache_move.py, 0.5.16 to 0.5.23.
    """
    if not len(tgt_loc):
        return
    target, source = tgt_loc.long(), src_loc.long()
    rows = 1 + int(torch.maximum(target, source).max())
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, stride)
        buffer[target] = buffer[source]
