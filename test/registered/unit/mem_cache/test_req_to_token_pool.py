# SPDX-License-Identifier: Apache-2.0
"""The pool of metadata rows stands beside the request pool: as large as it needs, nothing leaks."""

import inspect
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.disaggregation import metadata_slots
from sglang.srt.disaggregation.metadata_slots import SlotPool
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.environ import envs
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.scheduler import Scheduler
from sglang.test.ci.ci_register import register_cpu_ci

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "disaggregation"))
from decode_side import DecodeSide

try:  # 0.5.13 and later
    from sglang.srt.managers.scheduler_components.invariant_checker import (
        SchedulerInvariantChecker as Checker,
    )
    from sglang.srt.managers.scheduler_components.metrics_reporter import (
        SchedulerMetricsReporter as Reporter,
    )
except ImportError:
    Checker = Reporter = Scheduler

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

HIDDEN = 7168  # DeepSeek-V3
IN_ALL_STATES = {"transferring": 1, "waiting": 1, "prebuilt": 1, "quarantined": 1}


class DecodeSideTest(unittest.TestCase):
    def serve(self, **how):
        side = DecodeSide(**how)
        self.addCleanup(side.close)
        return side


class TestSize(DecodeSideTest):
    def test_every_request_row_has_a_slot_and_headroom_stays(self):
        for size, pre_alloc, headroom in ((4, 8, 2), (64, 0, 2), (4, 8, 8), (16, 64, 2)):
            rows = DecodeSide(size=size, pre_alloc=pre_alloc)
            self.addCleanup(rows.close)
            slots = metadata_slots.pool_size(rows.rows, headroom)
            self.assertGreaterEqual(slots, rows.rows.available_size() + headroom * size)

    def test_the_scheduler_builds_buffers_and_pool_of_that_size(self):
        side = self.serve(size=4, pre_alloc=8)
        made = {}
        server = mock.MagicMock(
            req_to_token_pool=side.rows, server_args=side.server_args, draft_worker=None
        )
        for part in ("carries_draft_hidden_states", "is_eagle", "is_standalone"):
            getattr(server.spec_algorithm, part).return_value = False
        server._get_draft_kv_pool.return_value = (None, None)

        def buffers(rows, *_, **__):
            made["buffers"] = rows

        replaced = {
            "MetadataBuffers": buffers,
            "DecodeTransferQueue": lambda **given: given["req_to_metadata_buffer_idx_allocator"],
            "DecodePreallocQueue": lambda **given: given["req_to_metadata_buffer_idx_allocator"],
            "get_dsa_seed_metadata_dim": lambda *_: 0,
            "is_minimax_sparse": lambda *_: False,
        }
        for name, value in replaced.items():
            if hasattr(scheduler_module, name):
                self.enterContext(mock.patch.object(scheduler_module, name, value))
        for name in ("get_disagg", "get_parallel", "get_device", "get_schedule", "get_spec"):
            if hasattr(scheduler_module, name):
                config = mock.MagicMock(
                    disaggregation_mode="decode",
                    disaggregation_transfer_backend="fake",
                    language_only=False,
                )
                self.enterContext(
                    mock.patch.object(scheduler_module, name, lambda config=config: config)
                )
        Scheduler.init_disaggregation(server)
        pool = server.req_to_metadata_buffer_idx_allocator
        self.assertIsInstance(pool, SlotPool)
        self.assertEqual(pool.size, metadata_slots.pool_size(side.rows, 2))
        self.assertEqual(made["buffers"], pool.size)
        self.assertIs(server.disagg_decode_transfer_queue, pool)
        self.assertIs(server.disagg_decode_prealloc_queue, pool)

    def test_a_row_costs_what_the_notes_say(self):
        """docs/ledger/metadata-slots.md: 15 872 bytes at hidden 7 168 in bfloat16, no DSA seed."""
        known = inspect.signature(MetadataBuffers.__init__).parameters
        more = {"max_sampling_mask_tokens": 16} if "max_sampling_mask_tokens" in known else {}
        with mock.patch.dict("os.environ", {"SGLANG_ENABLE_DISAGG_SAMPLING_MASK": "0"}):
            buffers = MetadataBuffers(2, HIDDEN, torch.bfloat16, **more)
        buffers.enable_sampling_mask = False  # always on in some releases, off by default in others
        _, _, bytes_per_row = buffers.get_buf_infos()
        self.assertEqual(sum(bytes_per_row), 15872)


class TestAdmission(DecodeSideTest):
    def test_request_rows_run_out_before_slots(self):
        side = self.serve(size=2, pre_alloc=3)
        for i in range(9):
            side.arrive(f"r{i}", i + 1)
        side.poll()
        self.assertEqual(side.rows.available_size(), 0)
        self.assertGreater(side.slots.available_size(), 0)
        self.assertEqual(len(side.transfer.queue), 5)

    def test_rows_run_out_first_even_when_none_comes_back(self):
        """Everybody waits with a held row, and a batch of others was aborted in transfer."""
        side = self.serve(size=2, pre_alloc=3)
        for i in range(side.rows.size * 2):
            side.arrive(f"gone{i}", i + 1)
            side.poll()
            side.abort(f"gone{i}")
            side.poll()
        for i in range(9):
            side.arrive(f"r{i}", 100 + i)
        side.poll()
        self.assertEqual(side.rows.available_size(), 0)
        self.assertEqual(len(side.transfer.queue), 5)

    def test_exhaustion_delays_and_never_fails(self):
        side = self.serve(slots=2)
        reqs = [side.arrive(f"r{i}", i + 1, max_new_tokens=2) for i in range(6)]
        for _ in range(20):
            side.poll()
            for entry in list(side.transfer.queue):
                side.arrived(entry.req.rid)
            side.turn()
        self.assertTrue(all(req.finished() for req in reqs))
        side.check_all_free()

    def test_totals_come_back_after_a_mixed_load(self):
        side = self.serve(size=3, pre_alloc=2)
        for i in range(12):
            side.arrive(f"r{i}", i + 1, max_new_tokens=1 + i % 4)
            side.poll()
            for entry in list(side.transfer.queue):
                (side.fail if i % 5 == 0 else side.arrived)(entry.req.rid)
            side.turn()
            if i % 3 == 0:
                side.abort(f"r{i}")
        for _ in range(10):
            for entry in list(side.transfer.queue):
                side.arrived(entry.req.rid)
            side.turns()
        side.check_all_free()


class TestIdleCheck(DecodeSideTest):
    def check(self, side, strict=True):
        checker = SimpleNamespace(
            req_to_token_pool=side.rows,
            disaggregation_mode=side.scheduler.disaggregation_mode,
            count_req_pool_leak_warnings=0,
            pool_stats_observer=SimpleNamespace(session_held_req_count=lambda: 0),
            _session_held_req_count=lambda: 0,
        )
        with envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE.override(strict):
            Checker._check_req_pool(checker)

    def test_a_leak_is_reported_with_its_owner(self):
        side = self.serve()
        req = side.arrive("lost", 1)
        side.poll()
        side.transfer.queue.clear()
        side.rows.free(req)
        with self.assertRaisesRegex(ValueError, "'lost'"):
            self.check(side)
        self.check(side, strict=False)

    def test_an_idle_server_is_silent(self):
        side = self.serve()
        self.check(side)
        side.arrive("a", 1)
        side.poll()
        side.abort("a")
        side.poll()
        self.check(side)  # a quarantined row belongs to nobody

    def test_a_server_that_receives_nothing_is_not_looked_at(self):
        side = self.serve()
        del side.rows.metadata_slots
        self.check(side)
        self.assertEqual(metadata_slots.log_suffix(side.rows), "")


class TestCounts(DecodeSideTest):
    def side_in_all_states(self):
        side = self.serve(size=8)
        for rid, room in (("waits", 1), ("runs", 2), ("gone", 3), ("flies", 4)):
            side.arrive(rid, room, max_new_tokens=9)
        side.poll()
        side.arrived("runs")
        side.poll()
        side.prebuild()
        side.arrived("waits")
        side.abort("gone")
        side.poll()
        return side

    def test_the_internal_state_has_counts_by_status(self):
        side = self.side_in_all_states()
        reply = SimpleNamespace(internal_state={})
        with_counts = metadata_slots.add_counts(lambda _self, _request: reply)
        with_counts(side.scheduler, None)
        counts = reply.internal_state["metadata_slots"]
        self.assertEqual(counts, {"free": side.slots.size - 4, **IN_ALL_STATES})
        self.assertTrue(hasattr(Scheduler.get_internal_state, "__wrapped__"))

    def test_the_decode_log_line_has_them_too(self):
        side = self.side_in_all_states()
        line = metadata_slots.log_suffix(side.rows)
        for status, count in IN_ALL_STATES.items():
            self.assertIn(f"{count} {status}", line)
        report = getattr(Reporter, "report_decode_stats", None) or Reporter.log_decode_stats
        self.assertIn("metadata_slots", report.__code__.co_names)

    def test_integrity_names_both_sides_of_a_sum_that_failed(self):
        pool = SlotPool(3)
        slot = pool.lease("a")
        pool.free_slots.append(slot.index)
        with self.assertRaisesRegex(AssertionError, "row 0"):
            pool.check_integrity()
        pool.free_slots.pop()
        pool.census[slot.status] += 1
        with self.assertRaisesRegex(AssertionError, "counted .* recorded"):
            pool.check_integrity()


if __name__ == "__main__":
    unittest.main()
