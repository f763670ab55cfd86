# SPDX-License-Identifier: Apache-2.0
"""Paged attention over SGLang's token pools: one decode and one extend operator.

Both read keys and values through `req_to_token`, the table from (request, position) to pool slot.
Callers: srt/layers/attention/intel_amx_backend.py of SGLang 0.5.23. Requests that extend by the
same number of tokens are computed together, padded to the longest of them; decode and EAGLE's
verify extend all requests alike, so they are a single batch.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

_SHARED_TAIL = (
    "bool is_cross_attn=False, int sliding_window_size=0, "
    "Tensor? encoder_lens=None, Tensor? sinks=None"
)
_DECODE_KV = "Tensor query, Tensor(a!) k_buffer, Tensor(b!) v_buffer"
_DECODE_REST = (
    "Tensor(c!) output, Tensor? key, Tensor? value, Tensor? loc, Tensor attn_logits, "
    "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    f"float sm_scale, float logit_cap, {_SHARED_TAIL}"
)
_EXTEND_KV = (
    "Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, "
    "Tensor k_buffer, Tensor v_buffer"
)
_EXTEND_REST = (
    "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, Tensor extend_seq_lens, "
    "Tensor extend_start_loc, int max_len_extend, "
    f"float sm_scale, float logit_cap, {_SHARED_TAIL}, "
    "Tensor? tree_mask=None, bool is_causal=True"
)


def decode_attention_cpu(
    query: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor | None,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool = False,
    sliding_window_size: int = 0,
    encoder_lens: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Store one new key and value per request, then attend with one query per request.

    query, output: [bs, heads, head_dim]; k_buffer, v_buffer: [slots, kv_heads, head_dim], `heads`
    a multiple of `kv_heads`; key, value: [bs, kv_heads * head_dim] or None when already stored at
    `loc` [bs]; req_to_token: [requests, positions] integer slots; req_pool_indices, seq_lens: [bs]
    integers, seq_lens counting the new token. `attn_logits` is scratch space and unused here.
    Writes `output` and rows `loc` of the buffers. Raises NotImplementedError for KV scales,
    logit caps, cross attention, sliding windows and sinks, which Llama does not use.
    """
    _require_plain(
        "decode_attention_cpu",
        k_scale,
        v_scale,
        logit_cap,
        is_cross_attn,
        sliding_window_size,
        sinks,
    )
    if key is not None and value is not None and loc is not None:
        k_buffer[loc] = key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    if query.shape[0]:
        table = req_to_token[req_pool_indices, : int(seq_lens.max())]
        within = _columns(table) < seq_lens[:, None]
        attended = _attend(query[:, None], k_buffer, v_buffer, table, within[:, None], sm_scale)
        output.copy_(attended[:, 0])


def extend_attention_cpu(
    q_extend: Tensor,
    k_extend: Tensor | None,
    v_extend: Tensor | None,
    o_extend: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool = False,
    sliding_window_size: int = 0,
    encoder_lens: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """Attend with the last `extend_seq_lens[i]` tokens of each request to all of its tokens.

    q_extend, o_extend: [tokens, heads, head_dim], request i's rows starting at
    `extend_start_loc[i]`; k_buffer, v_buffer: [slots, kv_heads, head_dim], `heads` a multiple of
    `kv_heads`. The caller has stored `k_extend` and `v_extend` in the buffers already, so they are
    not read. req_to_token: [requests, positions] integer slots; req_pool_indices, seq_lens (prefix
    and extension), extend_seq_lens, extend_start_loc: [bs] integers.

    Everyone sees the prefix. Within the extension a token sees those before it and itself; all of
    it when not `is_causal`; or what `tree_mask` says: flat bool, an [n, n] block (row sees column)
    per request with n = extend_seq_lens[i], request after request. Writes `o_extend`. Raises
    NotImplementedError for the same options as `decode_attention_cpu`.
    """
    _require_plain(
        "extend_attention_cpu",
        k_scale,
        v_scale,
        logit_cap,
        is_cross_attn,
        sliding_window_size,
        sinks,
    )
    squares = extend_seq_lens.long().square()
    block_start = squares.cumsum(0) - squares
    for extent, members in _alike(extend_seq_lens.tolist()):
        lens, within = seq_lens[members], torch.arange(extent)
        table = req_to_token[req_pool_indices[members], : int(lens.max())]
        column, prefix = _columns(table), (lens - extent)[:, None, None]
        if tree_mask is not None:
            cells = block_start[members][:, None] + torch.arange(extent * extent)
            block = tree_mask.view(-1)[cells].view(-1, extent, extent).bool()
            visible = (column < prefix).repeat(1, extent, 1)
            visible.scatter_(2, (prefix + within).expand_as(block), block)
        elif is_causal:
            visible = column <= prefix + within[:, None]
        else:
            visible = (column < prefix + extent).expand(-1, extent, -1)
        rows = extend_start_loc[members][:, None] + within
        o_extend[rows] = _attend(q_extend[rows], k_buffer, v_buffer, table, visible, sm_scale)


def _alike(extents: list[int]) -> Iterator[tuple[int, slice | list[int]]]:
    """Requests that extend by the same number of tokens, more than none, as an index each."""
    different = set(extents)
    for extent in different - {0}:
        alone = len(different) == 1
        yield extent, slice(None) if alone else [i for i, n in enumerate(extents) if n == extent]


def _columns(table: Tensor) -> Tensor:
    return torch.arange(table.shape[1])


def _attend(
    query: Tensor, k_buffer: Tensor, v_buffer: Tensor, table: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """[bs, rows, heads, head_dim] from query of that shape, table [bs, columns] of slots and
    visible [bs, rows, columns]."""
    # What lies beyond a request's end is stale: point it at slot 0, which SGLang keeps as padding.
    slots = table.masked_fill(~visible.any(1), 0).flatten()
    # index_select takes a third of the time of k_buffer[slots] and reads most of all it does here
    keys, values = (
        buffer.index_select(0, slots).view(*table.shape, *buffer.shape[1:]).to(query.dtype)
        for buffer in (k_buffer, v_buffer)
    )
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=visible[:, None],
        scale=scale,
        enable_gqa=True,
    )
    return attended.transpose(1, 2)


def _require_plain(
    operator: str,
    k_scale: float,
    v_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    sinks: Tensor | None,
) -> None:
    asked = {
        "KV cache scales": (k_scale, v_scale) != (1.0, 1.0),
        "a logit cap": logit_cap > 0,
        "cross attention": is_cross_attn,
        "a sliding window": sliding_window_size > 0,
        "attention sinks": sinks is not None,
    }
    wanted = [option for option, used in asked.items() if used]
    if wanted:
        raise NotImplementedError(
            f"sgl_kernel.{operator}: the CPU stand-in has no {' and no '.join(wanted)}. "
            "Serve a plain Llama, or install SGLang's own sgl_kernel."
        )


def _decode_unscaled(query: Tensor, k_buffer: Tensor, v_buffer: Tensor, *rest: object) -> None:
    decode_attention_cpu(query, k_buffer, v_buffer, 1.0, 1.0, *rest)  # type: ignore[arg-type]


def _extend_unscaled(
    q: Tensor, k: Tensor | None, v: Tensor | None, o: Tensor, kb: Tensor, vb: Tensor, *rest: object
) -> None:
    extend_attention_cpu(q, k, v, o, kb, vb, 1.0, 1.0, *rest)  # type: ignore[arg-type]


# The unscaled overloads are the argument lists of 0.5.19 and older; torch picks by what fits.
_library = Library("sgl_kernel", "FRAGMENT")
for _schema, _operator in {
    f"decode_attention_cpu({_DECODE_KV}, float k_scale, float v_scale, {_DECODE_REST}) -> ()": (
        decode_attention_cpu
    ),
    f"decode_attention_cpu.unscaled({_DECODE_KV}, {_DECODE_REST}) -> ()": _decode_unscaled,
    f"extend_attention_cpu({_EXTEND_KV}, float k_scale, float v_scale, {_EXTEND_REST}) -> ()": (
        extend_attention_cpu
    ),
    f"extend_attention_cpu.unscaled({_EXTEND_KV}, {_EXTEND_REST}) -> ()": _extend_unscaled,
}.items():
    _library.define(_schema)
    _library.impl(_schema.split("(")[0], _operator, "CPU")
