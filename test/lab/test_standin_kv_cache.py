# SPDX-License-Identifier: Apache-2.0
"""Slot tables, row moves and token shifts against plain loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdlab.standin import sgl_kernel

POOL_LEN = 40
seeds = st.integers(0, 999)
spans = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=6)


def table(requests: int, seed: int) -> tuple[Tensor, Tensor]:
    """A req_to_token table of distinct slots and the rows that belong to the batch."""
    torch.manual_seed(seed)
    rows = requests + 3
    slots = torch.randperm(rows * POOL_LEN).view(rows, POOL_LEN).int()
    return slots, torch.randperm(rows)[:requests]


@settings(max_examples=40, deadline=None)
@given(spans, seeds)
def test_written_slots_land_in_their_span_and_nowhere_else(
    requests: list[tuple[int, int]], seed: int
) -> None:
    slots, rows = table(len(requests), seed)
    start = torch.tensor([s for s, _ in requests], dtype=torch.int32)
    end = torch.tensor([s + n for s, n in requests], dtype=torch.int32)
    packed = torch.arange(1000, 1000 + sum(n for _, n in requests) + 2)
    expected, taken = slots.clone(), iter(packed.tolist())
    for row, (begin, length) in zip(rows, requests, strict=True):
        for position in range(begin, begin + length):
            expected[row, position] = next(taken)
    sgl_kernel.assign_req_to_token_pool_cpu(rows, slots, start, end, packed, POOL_LEN)
    assert torch.equal(slots, expected)


@settings(max_examples=40, deadline=None)
@given(spans, seeds)
def test_slots_of_a_span_are_read_packed(requests: list[tuple[int, int]], seed: int) -> None:
    slots, rows = table(len(requests), seed)
    start = torch.tensor([s for s, _ in requests], dtype=torch.int32)
    end = torch.tensor([s + n for s, n in requests], dtype=torch.int32)
    expected = [
        int(slots[row, position])
        for row, (begin, length) in zip(rows, requests, strict=True)
        for position in range(begin, begin + length)
    ]
    out = torch.full((len(expected) + 2,), -5, dtype=torch.int64)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, slots, start, end, out, POOL_LEN)
    assert out.tolist() == [*expected, -5, -5]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
    seeds,
)
def test_each_draft_branch_sees_the_prefix_and_its_own_slots(
    lens: list[int], topk: int, steps: int, seed: int
) -> None:
    slots, rows = table(len(lens), seed)
    before = slots.clone()
    seq_lens = torch.tensor(lens)
    behind = torch.empty(len(lens) * topk * steps, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(
        rows, slots, seq_lens, behind, POOL_LEN, topk, steps
    )
    branches = sgl_kernel.build_draft_decode_metadata_cpu(
        slots, rows, seq_lens, topk, steps, POOL_LEN
    )
    assert branches.shape == (len(lens) * topk, POOL_LEN)
    assert branches.dtype == slots.dtype
    for i, length in enumerate(lens):
        own = slots[rows[i], length : length + topk * steps].view(topk, steps)
        assert torch.equal(behind.view(len(lens), topk, steps)[i], own.long())
        for branch in range(topk):
            expected = torch.cat([slots[rows[i], :length], own[branch]])
            assert torch.equal(branches[i * topk + branch, : length + steps], expected)
    assert torch.equal(slots, before)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(-1, 15), min_size=4, max_size=4), min_size=1, max_size=5), seeds
)
def test_slots_of_accepted_drafts_are_packed_in_order(accepted: list[list[int]], seed: int) -> None:
    torch.manual_seed(seed)
    loc = torch.randperm(99)[:16]
    expected = [int(loc[i]) for row in accepted for i in row if i != -1]
    out = torch.full((len(expected) + 1,), -5, dtype=torch.int64)
    sgl_kernel.fill_accept_out_cache_loc_cpu(torch.tensor(accepted).int(), loc, out)
    assert out.tolist() == [*expected, -5]


@pytest.mark.parametrize(
    ("target", "source"),
    [([], []), ([3], [3]), ([4, 2], [2, 4]), ([1, 2, 3], [2, 3, 4]), ([7, 0], [5, 5])],
)
def test_rows_move_in_every_buffer_as_if_all_were_read_first(
    target: list[int], source: list[int]
) -> None:
    torch.manual_seed(0)
    buffers = [torch.randn(8, 2, 5), torch.randn(8, 3).bfloat16(), torch.arange(8)]
    expected = [buffer.clone() for buffer in buffers]
    for before, after in zip(buffers, expected, strict=True):
        for to, origin in zip(target, source, strict=True):
            after[to] = before[origin]
    sgl_kernel.copy_all_layer_kv_cache_cpu(
        torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64),
        torch.tensor([b[0].numel() * b.element_size() for b in buffers]),
        torch.tensor(target, dtype=torch.int64),
        torch.tensor(source, dtype=torch.int64),
    )
    for buffer, wanted in zip(buffers, expected, strict=True):
        assert torch.equal(buffer, wanted)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=6), seeds)
def test_the_bonus_token_is_the_last_accepted_one(accept_lens: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    stride = 4
    tokens = torch.randint(0, 500, (len(accept_lens) * stride,), dtype=torch.int32)
    expected = [int(tokens[stride * i + n - 1]) for i, n in enumerate(accept_lens)]
    bonus = torch.empty(len(accept_lens), dtype=torch.int32)
    sgl_kernel.fill_bonus_tokens_cpu(tokens, torch.tensor(accept_lens).int(), bonus, stride)
    assert bonus.tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=5), st.booleans(), st.sampled_from([None, 1, 3]), seeds)
def test_rotated_ids_drop_the_first_and_end_in_the_new_token(
    lens: list[int], select: bool, topk: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    ids = torch.randint(0, 500, (sum(lens),))
    starts = [sum(lens[:i]) for i in range(len(lens))]
    newest = torch.randint(500, 999, (len(lens),) if topk is None else (len(lens), topk))
    chosen = [s + max(n - 2, 0) for s, n in zip(starts, lens, strict=True)] if select else None
    expected = ids.tolist()
    for i, (start, length) in enumerate(zip(starts, lens, strict=True)):
        if not length:
            continue
        first = newest[i] if topk is None else newest[i, 0]
        expected[start : start + length - 1] = ids[start + 1 : start + length].tolist()
        expected[chosen[i] if chosen else start + length - 1] = int(first)
    sgl_kernel.rotate_input_ids_cpu(
        ids,
        torch.tensor(starts).int(),
        torch.tensor(lens).int(),
        newest,
        None if chosen is None else torch.tensor(chosen),
    )
    assert ids.tolist() == expected
