# SPDX-License-Identifier: Apache-2.0
"""A prebuilt batch names the slots that follow each request's prefix, and no other."""

import itertools
import unittest
from array import array
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.disaggregation import decode_schedule_batch_mixin as mixin
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

ROW = 16  # tokens of every request here, prefix and extend together
FIRST_SLOT = 100


class SliceTaken(Exception):
    """Raised in place of what follows the slice, with the tensor that was built."""

    def __init__(self, out_cache_loc):
        super().__init__()
        self.out_cache_loc = out_cache_loc


class Request(SimpleNamespace):
    """A request at the prebuilt step: `prefix` tokens cached, the others to extend.

    The names are those of every release in range: 0.5.9 keeps `extend_input_len`, 0.5.16 an
    `extend_range`, 0.5.19 the pool index under `kv`, 0.5.23 plain lengths.
    """

    def __init__(self, row, prefix):
        extend = ROW - prefix
        # The releases that put tokens into an `array` concatenate only arrays.
        tokens = array("q", range(ROW)) if hasattr(mixin, "array") else list(range(ROW))
        super().__init__(
            rid=f"r{row}",
            req_pool_idx=row,
            kv=SimpleNamespace(req_pool_idx=row),
            prefix_indices=torch.arange(prefix, dtype=torch.int64),
            prefix_len=prefix,
            extend_len=extend,
            extend_end=ROW,
            extend_input_len=extend,
            extend_range=SimpleNamespace(length=extend, start=prefix, end=ROW),
            fill_ids=tokens,
            full_untruncated_fill_ids=tokens,
            origin_input_ids=tokens,
            output_ids=[],
            fill_len=ROW,
            cached_tokens=0,
            cached_tokens_device=0,
            already_computed=0,
            is_retracted=False,
            retracted_stain=False,
        )

    def get_fill_ids(self):
        return self.fill_ids


def built_slots(prefixes):
    """`out_cache_loc` of a batch with these prefix lengths; request r holds slots 100(r+1) …"""
    requests = [Request(row, prefix) for row, prefix in enumerate(prefixes)]
    rows = torch.stack(
        [torch.arange(ROW) + FIRST_SLOT * (row + 1) for row in range(len(requests))]
    ).to(torch.int32)
    batch = mixin.ScheduleBatchDisaggregationDecodeMixin()
    batch.reqs = requests
    batch.device = "cpu"
    batch.req_to_token_pool = SimpleNamespace(req_to_token=rows, device="cpu")
    batch.model_config = SimpleNamespace(is_encoder_decoder=False, vocab_size=512)
    batch.tree_cache = SimpleNamespace(page_size=1)
    batch.token_to_kv_pool_allocator = SimpleNamespace(page_size=1)
    batch.spec_algorithm = SimpleNamespace(is_none=lambda: True)
    batch.return_logprob = False
    # Everything after the slices belongs to other fields of the batch; the attribute store ends it.
    with mock.patch.object(
        mixin.ScheduleBatchDisaggregationDecodeMixin, "out_cache_loc", _Stop(), create=True
    ):
        try:
            batch.prepare_for_prebuilt()
        except SliceTaken as taken:
            return taken.out_cache_loc.tolist()
    raise AssertionError("prepare_for_prebuilt stored no out_cache_loc")


class _Stop:
    """Ends the method under test where it stores the tensor."""

    def __set__(self, batch, value):
        raise SliceTaken(value)


class TestPrebuiltSuffixSlice(unittest.TestCase):
    def test_extend_slots_begin_where_the_prefix_ends(self):
        for prefix in (0, 1, 4, 8, 15):
            with self.subTest(prefix=prefix):
                self.assertEqual(
                    built_slots([prefix]), list(range(FIRST_SLOT + prefix, FIRST_SLOT + ROW))
                )

    def test_mixed_batches_keep_request_order_and_total_length(self):
        for prefixes in itertools.permutations((0, 4, 15)):
            with self.subTest(prefixes=prefixes):
                wanted = [
                    slot
                    for row, prefix in enumerate(prefixes)
                    for slot in range(FIRST_SLOT * (row + 1) + prefix, FIRST_SLOT * (row + 1) + ROW)
                ]
                self.assertEqual(built_slots(prefixes), wanted)


if __name__ == "__main__":
    unittest.main()
