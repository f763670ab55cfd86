# SPDX-License-Identifier: Apache-2.0
"""The attention operators against a loop over single queries in float64."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdlab.standin import sgl_kernel  # noqa: F401  (registers the operators)

OPS = torch.ops.sgl_kernel
POOL_LEN = 64
NO_OPTIONS = (False, 0, None, None)


@dataclass
class Paged:
    """Requests whose tokens lie scattered over a pool of which all other slots are NaN."""

    prefixes: list[int]
    extents: list[int]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 8
    dtype: torch.dtype = torch.float32
    seed: int = 0
    query: Tensor = field(init=False)
    scale: float = 0.3

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        heads, kv_heads = self.heads
        slots = 1 + 2 * len(self.prefixes) * POOL_LEN
        shape = (slots, kv_heads, self.head_dim)
        self.keys = torch.full(shape, float("nan"), dtype=self.dtype)
        self.values = self.keys.clone()
        free = (torch.randperm(slots - 1) + 1).tolist()
        # Rows beyond a request's end are stale on purpose: they point at NaN or out of the pool.
        self.table = torch.randint(1, 10 * slots, (len(self.prefixes) + 3, POOL_LEN)).int()
        self.rows = torch.randperm(len(self.table))[: len(self.prefixes)]
        used = [0]
        for row, length in zip(self.rows.tolist(), self.lens.tolist(), strict=True):
            mine, free = free[:length], free[length:]
            self.table[row, :length] = torch.tensor(mine).int()
            used += mine
        self.keys[used] = torch.randn(len(used), *shape[1:]).to(self.dtype)
        self.values[used] = torch.randn(len(used), *shape[1:]).to(self.dtype)
        self.query = torch.randn(sum(self.extents), heads, self.head_dim).to(self.dtype)

    @property
    def lens(self) -> Tensor:
        return torch.tensor([p + e for p, e in zip(self.prefixes, self.extents, strict=True)])

    @property
    def starts(self) -> Tensor:
        ends = torch.tensor(self.extents).cumsum(0)
        return (ends - torch.tensor(self.extents)).int()

    def extend(self, tree_mask: Tensor | None = None, causal: bool = True) -> Tensor:
        output = torch.full_like(self.query, 7.0)
        OPS.extend_attention_cpu(
            *(self.query, None, None, output, self.keys, self.values, 1.0, 1.0),
            *(self.table, self.rows, self.lens, torch.tensor(self.extents).int(), self.starts),
            *(max(self.extents), self.scale, 0.0, *NO_OPTIONS, tree_mask, causal),
        )
        return output

    def expected(self, tree_mask: Tensor | None = None, causal: bool = True) -> Tensor:
        """One query at a time: which positions it may see, then softmax over their scores."""
        output = []
        masks = iter(() if tree_mask is None else tree_mask.tolist())
        group = self.heads[0] // self.heads[1]
        token = 0
        for row, prefix, extent in zip(self.rows, self.prefixes, self.extents, strict=True):
            blocks = [
                [next(masks) for _ in range(extent)] for _ in range(extent) if tree_mask is not None
            ]
            for i in range(extent):
                if tree_mask is not None:
                    seen = [*range(prefix), *(prefix + j for j in range(extent) if blocks[i][j])]
                else:
                    seen = list(range(prefix + (i + 1 if causal else extent)))
                slots = self.table[row, seen].long()
                for head in range(self.heads[0]):
                    keys = self.keys[slots, head // group].double()
                    values = self.values[slots, head // group].double()
                    scores = keys @ self.query[token, head].double() * self.scale
                    output.append(scores.softmax(0) @ values)
                token += 1
        return torch.stack(output).view_as(self.query).to(self.dtype) if output else self.query


def batches(extents: st.SearchStrategy[int]) -> st.SearchStrategy[Paged]:
    heads = st.sampled_from([(1, 1), (4, 2), (6, 3), (8, 1)])
    request = st.tuples(st.integers(0, 20), extents)
    return st.builds(
        lambda requests, heads, head_dim, seed: Paged(
            [p for p, _ in requests], [e for _, e in requests], heads, head_dim, seed=seed
        ),
        st.lists(request, min_size=1, max_size=5),
        heads,
        st.sampled_from([4, 16]),
        st.integers(0, 999),
    )


@settings(max_examples=60, deadline=None)
@given(batches(st.integers(0, 9)), st.booleans())
def test_extend_sees_prefix_and_own_tokens_whatever_the_lengths(batch: Paged, causal: bool) -> None:
    torch.testing.assert_close(batch.extend(causal=causal), batch.expected(causal=causal))


@settings(max_examples=60, deadline=None)
@given(batches(st.integers(0, 8)), st.integers(0, 999))
def test_tree_mask_rules_within_the_extension_and_never_hides_the_prefix(
    batch: Paged, seed: int
) -> None:
    torch.manual_seed(seed)
    blocks = [(torch.rand(n, n) < 0.4) | torch.eye(n).bool() for n in batch.extents]
    mask = torch.cat([block.flatten() for block in blocks])
    torch.testing.assert_close(batch.extend(mask), batch.expected(mask))


@pytest.mark.parametrize("rows", [4, 8])
def test_verify_of_a_chain_is_the_same_with_and_without_its_mask(rows: int) -> None:
    batch = Paged([5, 0, 17], [rows] * 3)
    chain = torch.ones(rows, rows).tril().bool().flatten().repeat(3)
    torch.testing.assert_close(batch.extend(chain), batch.extend())


def test_a_mask_longer_than_the_batch_is_read_from_its_front() -> None:
    batch = Paged([5, 2], [4, 4])
    mask = torch.ones(4, 4).tril().bool().flatten().repeat(2)
    longer = torch.cat([mask, torch.zeros(16, dtype=torch.bool)])
    torch.testing.assert_close(batch.extend(longer), batch.extend(mask))


def test_nothing_to_extend_writes_nothing() -> None:
    assert Paged([3, 4], [0, 0]).extend().numel() == 0
    mixed = Paged([3, 4, 5], [0, 2, 0])
    torch.testing.assert_close(mixed.extend(), mixed.expected())


@settings(max_examples=40, deadline=None)
@given(batches(st.just(1)))
def test_decode_stores_the_new_token_and_attends_to_all(batch: Paged) -> None:
    kv_heads, head_dim = batch.keys.shape[1:]
    bs = len(batch.prefixes)
    loc = batch.table[batch.rows, batch.lens - 1].long()
    key, value = torch.randn(2, bs, kv_heads * head_dim)
    output = torch.empty_like(batch.query)
    OPS.decode_attention_cpu(
        *(batch.query, batch.keys, batch.values, 1.0, 1.0, output, key, value, loc, output),
        *(batch.table, batch.rows, batch.lens, batch.scale, 0.0, *NO_OPTIONS),
    )
    assert torch.equal(batch.keys[loc].flatten(1), key)
    assert torch.equal(batch.values[loc].flatten(1), value)
    torch.testing.assert_close(output, batch.expected())


def test_decode_without_key_leaves_the_buffers_alone() -> None:
    batch = Paged([6, 2], [1, 1])
    before = batch.keys.clone()
    output = torch.empty_like(batch.query)
    OPS.decode_attention_cpu(
        *(batch.query, batch.keys, batch.values, 1.0, 1.0, output, None, None, None, output),
        *(batch.table, batch.rows, batch.lens, batch.scale, 0.0, *NO_OPTIONS),
    )
    assert torch.equal(batch.keys.nan_to_num(), before.nan_to_num())
    torch.testing.assert_close(output, batch.expected())


def test_an_idle_batch_decodes_to_nothing() -> None:
    empty = torch.empty(0, 4, 8)
    none = torch.empty(0, dtype=torch.long)
    OPS.decode_attention_cpu(
        *(empty, torch.zeros(4, 2, 8), torch.zeros(4, 2, 8), 1.0, 1.0, empty),
        *(torch.empty(0, 16), torch.empty(0, 16), none, empty),
        *(torch.zeros(3, 9).int(), none, none, 0.3, 0.0, *NO_OPTIONS),
    )


def test_bfloat16_stays_within_its_own_rounding() -> None:
    batch = Paged([9, 4], [3, 5], dtype=torch.bfloat16)
    torch.testing.assert_close(batch.extend(), batch.expected(), atol=2e-2, rtol=2e-2)


def test_argument_lists_of_older_releases_mean_the_same() -> None:
    batch = Paged([6, 2], [1, 1])
    place = (batch.table, batch.rows, batch.lens)
    extents = torch.tensor(batch.extents).int()
    outputs = []
    for options in ((), NO_OPTIONS):  # up to 0.5.12.post1, then up to 0.5.19
        decoded, extended = torch.empty_like(batch.query), torch.empty_like(batch.query)
        OPS.decode_attention_cpu(
            *(batch.query, batch.keys, batch.values, decoded, None, None, None, decoded),
            *(*place, batch.scale, 0.0, *options),
        )
        OPS.extend_attention_cpu(
            *(batch.query, None, None, extended, batch.keys, batch.values),
            *(*place, extents, batch.starts, 1, batch.scale, 0.0, *options),
        )
        outputs += [decoded, extended]
    for output in outputs:
        torch.testing.assert_close(output, batch.expected())


@pytest.mark.parametrize(
    ("scales", "cap", "options", "named"),
    [
        ((0.5, 1.0), 0.0, NO_OPTIONS, "KV cache scales"),
        ((1.0, 1.0), 30.0, NO_OPTIONS, "a logit cap"),
        ((1.0, 1.0), 0.0, (True, 0, None, None), "cross attention"),
        ((1.0, 1.0), 0.0, (False, 128, None, None), "a sliding window"),
        ((1.0, 1.0), 0.0, (False, 0, None, torch.zeros(4)), "attention sinks"),
    ],
)
def test_an_option_it_does_not_have_is_refused_by_name(
    scales: tuple[float, float], cap: float, options: tuple[object, ...], named: str
) -> None:
    batch = Paged([6], [1])
    output = torch.empty_like(batch.query)
    with pytest.raises(NotImplementedError, match=f"extend_attention_cpu.*{named}"):
        OPS.extend_attention_cpu(
            *(batch.query, None, None, output, batch.keys, batch.values, *scales),
            *(batch.table, batch.rows, batch.lens, torch.tensor([1]), batch.starts, 1),
            *(batch.scale, cap, *options, None, True),
        )
    with pytest.raises(NotImplementedError, match=f"decode_attention_cpu.*{named}"):
        OPS.decode_attention_cpu(
            *(batch.query, batch.keys, batch.values, *scales, output, None, None, None, output),
            *(batch.table, batch.rows, batch.lens, batch.scale, cap, *options),
        )
