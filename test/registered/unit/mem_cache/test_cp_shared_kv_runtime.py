# SPDX-License-Identifier: Apache-2.0
"""A draft on a sharded pool: no prefix hit unless asked for, and no row read that nobody wrote."""

import inspect
import logging
import os
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.mem_cache import draft_reuse
from sglang.test.ci.ci_register import register_cpu_ci

try:
    from sglang.srt.arg_groups import kv_shard_hook
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.mem_cache import page_interleave_pool
    from sglang.srt.mem_cache.page_interleave import PageShardSpec
except ImportError:  # a sharded pool takes a draft from 0.5.23 on
    kv_shard_hook = None

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

SHARDED_DRAFTS = unittest.skipUnless(kv_shard_hook, "a sharded pool takes a draft from 0.5.23 on")
PAGE, RANKS, SLOTS = 4, 2, 32


class Stream:
    """A GPU stream whose work is done when it is given."""

    def wait_stream(self, _):
        pass

    def wait_event(self, _):
        pass


class Device:
    """`torch.cuda` for one process without a GPU."""

    Stream = Stream
    Event = mock.MagicMock

    def current_stream(self):
        return Stream()

    def stream(self, _):
        return mock.MagicMock()


class Gather:
    """The all-gather between the ranks: a block waits here until every rank has sent its own."""

    def __init__(self, *_, **__):
        self.sent = []

    def change_state(self, **_):
        return mock.MagicMock()

    def all_gather(self, out, block):
        self.sent.append((out, block))


def sharded_pools():
    """A one-layer draft's pool on each of two ranks, all rows NaN but those the test writes."""
    pools = []
    with (
        mock.patch.object(page_interleave_pool, "PyNcclCommunicator", Gather),
        mock.patch.object(torch, "get_device_module", lambda *_: Device()),
    ):
        for rank in range(RANKS):
            group = SimpleNamespace(
                world_size=RANKS, rank_in_group=rank, cpu_group=None, device="cpu"
            )
            spec = PageShardSpec(rank, RANKS, PAGE, max_prefix_tokens=32, chunk_tokens=16)
            pool = page_interleave_pool.PageInterleaveMHATokenToKVPool(
                size=SLOTS,
                page_size=PAGE,
                dtype=torch.float32,
                head_num=1,
                head_dim=2,
                layer_num=1,
                device="cpu",
                enable_memory_saver=False,
                shard_spec=spec,
                shard_group=group,
            )
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer.fill_(float("nan"))
            for slot in pool._slots:
                for tensor in slot.tensors.values():
                    tensor.fill_(float("nan"))
            pools.append(pool)
    return pools


def exchange(pools):
    """Deliver what the ranks have sent since the last time."""
    for sends in zip(*(pool.kv_gather_comm.sent for pool in pools), strict=True):
        blocks = [block.clone() for _, block in sends]
        for out, _ in sends:
            out.copy_(torch.cat(blocks))
    for pool in pools:
        pool.kv_gather_comm.sent.clear()


@SHARDED_DRAFTS
class Runtime(unittest.TestCase):
    """The plan of a batch covers what its attention reads, on a draft of a single layer."""

    def setUp(self):
        self.pools = sharded_pools()
        self.row = torch.zeros((2, 64), dtype=torch.int32)
        # Logical pages 2, 3, 4, 5: owners 0, 1, 0, 1, as the allocator rotates them.
        self.slots = torch.arange(2 * PAGE, 6 * PAGE)
        self.row[1, : len(self.slots)] = self.slots.to(torch.int32)

    def begin(self, prefix, length):
        for pool in self.pools:
            pool.begin_shard_extend(self.row, torch.tensor([1]), [prefix], [length])
        exchange(self.pools)

    def write(self, prefix, length):
        """What the draft writes for its chunk: row t holds t, the same on every rank."""
        values = torch.arange(prefix, length, dtype=torch.float32)[:, None, None].repeat(1, 1, 2)
        for pool in self.pools:
            layer = SimpleNamespace(layer_id=0)
            pool.set_kv_buffer(layer, self.slots[prefix:length], values, -values)

    def read(self, length):
        """Keys of the first `length` tokens as attention finds them, by rank."""
        for pool in self.pools:
            rows = pool.translate_loc_to_scratch(self.slots[:length])
            yield pool.get_key_buffer(0)[rows][:, 0, 0].tolist()

    def test_chunks_of_one_prompt_follow_each_other_without_an_unwritten_row(self):
        for prefix, length in ((0, 8), (8, 14)):
            self.begin(prefix, length)
            self.write(prefix, length)
            for rank, keys in enumerate(self.read(length)):
                self.assertEqual([float(t) for t in range(length)], keys, f"rank {rank}")

    def test_a_prefix_nobody_wrote_is_what_the_gate_keeps_away(self):
        """The plan itself asks nothing: it gathers whatever the stripes hold."""
        self.begin(8, 12)
        self.write(8, 12)
        for keys in self.read(12):
            self.assertTrue(torch.tensor(keys[:8]).isnan().all())
            self.assertEqual([8.0, 9.0, 10.0, 11.0], keys[8:])

    def test_the_gather_ahead_ends_with_the_last_layer(self):
        self.begin(0, 8)
        self.write(0, 8)
        self.begin(8, 12)
        for pool in self.pools:
            epoch = pool._slots[0].resident_key
            pool._prefetch_layer(1)
            pool.get_key_buffer(0)
            self.assertEqual([], pool.kv_gather_comm.sent)
            self.assertEqual(epoch, pool._slots[0].resident_key)
            self.assertIsNone(pool._slots[1].resident_key)

    def test_padding_lands_in_the_trash_page_and_no_planned_row_does(self):
        self.begin(0, 8)
        for pool in self.pools:
            planned = pool.translate_loc_to_scratch(self.slots[:8])
            self.assertTrue((planned < pool._trash_base).all())
            outside = pool.translate_loc_to_scratch(self.slots[8:])
            self.assertTrue((outside >= pool._trash_base).all())


class Start(unittest.TestCase):
    def test_a_scheduler_asks_at_start_whether_cached_kv_can_serve_its_draft(self):
        from sglang.srt.managers.scheduler import Scheduler

        begin = inspect.unwrap(Scheduler.init_disaggregation)  # others may decorate it
        self.assertIn("draft_reuse", begin.__code__.co_names)


@unittest.skipUnless(
    hasattr(kv_shard_hook, "get_dsa_index_kpool"), "0.5.22 refuses a draft with a sharded pool"
)
class Gate(unittest.TestCase):
    """`--enable-kv-cache-sharding` with a draft: prefix hits only when they are asked for."""

    def setUp(self):
        draft_reuse._told.clear()
        os.environ.pop(draft_reuse.UNVERIFIED, None)

    def resolve(self, **changes):
        """Server arguments after the hook, up to the first upstream check that this test trips."""
        arguments = {
            "enable_kv_cache_sharding": True,
            "speculative_algorithm": "EAGLE",
            "disable_radix_cache": False,
            "enable_hierarchical_cache": True,
            "disaggregation_mode": "decode",
            "device": "cpu",
        }
        server_args = SimpleNamespace(**{**arguments, **changes})
        with (
            mock.patch.object(kv_shard_hook, "resolving_view", lambda _: server_args),
            mock.patch.object(kv_shard_hook, "get_device_memory_capacity", lambda _: 1),
            self.assertRaisesRegex(ValueError, "PD prefill"),
        ):
            kv_shard_hook.handle_kv_cache_sharding(server_args)
        declared = getattr(server_args, "_resolved_overrides", [])
        return {name: value for _, fields in declared for name, value in fields.items()}

    def test_a_draft_takes_no_prefix_hit_and_a_warning_says_so(self):
        with self.assertLogs(draft_reuse.logger, logging.WARNING) as logs:
            for _ in range(2):
                declared = self.resolve()
        self.assertEqual(
            {"disable_radix_cache": True, "enable_hierarchical_cache": False}, declared
        )
        self.assertEqual(1, len(logs.output), logs.output)
        self.assertIn(draft_reuse.UNVERIFIED, logs.output[0])

    def test_what_is_declared_is_what_later_hooks_see(self):
        fields = {
            "enable_kv_cache_sharding": True,
            "speculative_algorithm": "EAGLE",
            "disable_radix_cache": False,
            "enable_hierarchical_cache": True,
        }
        server_args = SimpleNamespace(**fields)
        draft_reuse.gate_sharded(server_args, server_args)
        seen = resolving_view(server_args)
        self.assertTrue(seen.disable_radix_cache)
        self.assertFalse(seen.enable_hierarchical_cache)

    def test_without_a_draft_nothing_changes(self):
        self.assertEqual({}, self.resolve(speculative_algorithm=None))

    def test_the_override_keeps_the_hits(self):
        with mock.patch.dict(os.environ, {draft_reuse.UNVERIFIED: "1"}):
            self.assertEqual({}, self.resolve())


if __name__ == "__main__":
    unittest.main()
