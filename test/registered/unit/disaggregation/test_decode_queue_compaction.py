# SPDX-License-Identifier: Apache-2.0
"""A transferred request owns its metadata row up to its first real result and returns it once."""

import contextlib
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.disaggregation import decode, draft_rows, metadata_slots
from sglang.srt.disaggregation.decode_schedule_batch_mixin import (
    ScheduleBatchDisaggregationDecodeMixin,
)
from sglang.srt.disaggregation.metadata_slots import SlotError, SlotPool, Status, Verdict
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.test.ci.ci_register import register_cpu_ci

sys.path.insert(0, str(Path(__file__).parent))
from decode_side import TOKEN, DecodeSide, ResultProcessor, release_kv_cache

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

LIMIT = metadata_slots.DEFAULT_QUARANTINE_SECONDS
HAS_DSA = "output_dsa_topk_indices_dim" in MetadataBuffers.__init__.__code__.co_varnames
HAS_DEFERRED = hasattr(decode.DecodeTransferQueue, "_do_release")
HAS_CHECKSUM = hasattr(Scheduler, "_handle_kv_checksum_mismatch")
HAS_QUEUE_DROP = hasattr(decode.DecodeTransferQueue, "release_memory_occupation")


class DecodeSideTest(unittest.TestCase):
    def serve(self, **how):
        side = DecodeSide(**how)
        self.addCleanup(side.close)
        return side

    def committed(self, side, *rids, seed=False, **how):
        """Requests whose transfer is committed, the i-th with draft fields of i + 1."""
        reqs = [side.arrive(rid, 100 + i, **how) for i, rid in enumerate(rids)]
        side.poll()
        for i, rid in enumerate(rids):
            side.arrived(rid, i + 1, seed)
        side.poll()
        return reqs

    def running(self, side, *rids, **how):
        """Requests that are in a batch and had their first result."""
        reqs = self.committed(side, *rids, **how)
        side.prebuild()
        side.first_result()
        return reqs


class TestTheHeldRow(DecodeSideTest):
    def test_the_views_lie_in_the_row_and_hold_its_values(self):
        side = self.serve()
        for i, req in enumerate(self.committed(side, "a", "b")):
            row = req.metadata_slot.index
            for view, field in (
                (req.output_topk_p, side.buffers.output_topk_p),
                (req.output_topk_index, side.buffers.output_topk_index),
                (req.hidden_states_tensor, side.buffers.output_hidden_states),
            ):
                self.assertEqual(view.data_ptr(), field[row].data_ptr())
                self.assertTrue((view == i + 1).all())

    @unittest.skipUnless(HAS_DSA, "this release has no DSA seed row")
    def test_the_seed_row_is_held_like_the_others(self):
        side = self.serve(dsa=4)
        (req,) = self.committed(side, "a", seed=True)
        row = req.metadata_slot.index
        expected = side.buffers.output_dsa_topk_indices[row].data_ptr()
        self.assertEqual(req.output_dsa_topk_indices.data_ptr(), expected)
        built = side.prebuild()
        self.assertEqual(built.spec_info.dsa_topk_indices.tolist(), [[1, 1, 1, 1]])

    def test_a_row_passes_once_and_comes_back_after_the_first_real_result(self):
        side = self.serve()
        req = side.arrive("a", 1)
        side.poll()
        self.assertIs(side.status(req), Status.TRANSFERRING)
        side.arrived("a")
        side.poll()
        self.assertIs(side.status(req), Status.WAITING)
        side.prebuild()
        self.assertIs(side.status(req), Status.PREBUILT)
        side.first_result()
        self.assertIsNone(side.status(req))
        self.assertFalse(req.finished())
        self.assertEqual(side.slots.counts()["free"], side.slots.size)

    def test_a_prebuilt_batch_alone_is_not_a_result(self):
        side = self.serve()
        self.committed(side, "a")
        side.prebuild()
        for mode in ("is_prebuilt", "is_idle"):
            quiet = {"is_prebuilt": lambda: False, "is_idle": lambda: False, mode: lambda: True}
            batch = SimpleNamespace(reqs=[], forward_mode=SimpleNamespace(**quiet))
            batch.reqs = side.scheduler.running_batch.reqs or side.unprocessed.reqs
            processed = metadata_slots.release_after_result(lambda *_: None)
            processed(side.scheduler, batch, None)
            self.assertEqual(side.slots.counts()["prebuilt"], 1, mode)

    def test_the_commit_copies_scalars(self):
        side = self.serve()
        req = side.arrive("a", 1)
        side.poll()
        row = side.entry("a").metadata_buffer_index
        side.buffers.cached_tokens[row, 0] = 3
        side.arrived("a")
        side.poll()
        side.buffers.output_ids[row] = 0
        side.buffers.cached_tokens[row] = 0
        self.assertEqual((list(req.output_ids), req.cached_tokens), ([TOKEN], 3))

    def test_the_commit_copies_no_byte_of_a_draft_field(self):
        side = self.serve()
        side.arrive("a", 1)
        side.poll()
        side.arrived("a")
        fields = ("output_topk_p", "output_topk_index", "output_hidden_states")
        draft = [getattr(side.buffers, name).untyped_storage().data_ptr() for name in fields]
        copied = []

        def noting(method):
            def noted(tensor, *args, **kwargs):
                copied.append(tensor.untyped_storage().data_ptr())
                return method(tensor, *args, **kwargs)

            return noted

        with contextlib.ExitStack() as stack:
            for name in ("clone", "copy_", "contiguous", "to", "tolist", "numpy"):
                noted = noting(getattr(torch.Tensor, name))
                stack.enter_context(mock.patch.object(torch.Tensor, name, noted))
            side.poll()
        self.assertEqual(side.waiting(), ["a"])
        self.assertTrue(copied)
        self.assertFalse(set(copied) & set(draft))

    def test_without_eagle_the_row_is_free_at_commit(self):
        for spec in (None, "NGRAM"):
            side = self.serve(spec=spec)
            (req,) = self.committed(side, "a")
            self.assertIsNone(side.status(req))
            self.assertIsNone(req.hidden_states_tensor)
            self.assertEqual(side.slots.counts()["free"], side.slots.size, spec)
            side.close()

    def test_a_waiting_requests_row_is_never_handed_out(self):
        """Views of freed rows were sglang#17259 and sglang#22716: the third request overwrote."""
        side = self.serve(slots=2)
        second, first = self.committed(side, "second", "first")
        third = side.arrive("third", 300)
        side.poll()
        self.assertEqual(third.rid, side.prealloc.queue[0].req.rid)  # delayed, not an error
        side.scheduler.waiting_queue.reverse()
        built = side.prebuild()
        self.assertEqual([req.rid for req in built.reqs], ["first", "second"])
        self.assertEqual(built.spec_info.topk_p.tolist(), [[2, 2], [1, 1]])
        self.assertEqual(built.spec_info.topk_index.tolist(), [[2, 2], [1, 1]])
        self.assertEqual(built.spec_info.hidden_states[:, 0].tolist(), [2, 1])
        self.assertEqual(side.slots.available_size(), 0)
        side.first_result()
        self.assertEqual(side.slots.available_size(), 2)
        side.poll()
        self.assertIs(side.status(third), Status.TRANSFERRING)
        for req in (first, second):
            self.assertIsNone(side.status(req))


class TestReadInPlace(unittest.TestCase):
    def buffers(self):
        side = DecodeSide(dsa=4 if HAS_DSA else 0)
        self.addCleanup(side.close)
        for name, field in vars(side.buffers).items():
            if isinstance(field, torch.Tensor):
                field.copy_(torch.arange(field.numel()).view(field.shape) + len(name))
        return side.buffers

    def test_the_fields_and_their_order_are_sglangs(self):
        buffers = self.buffers()
        stock = MetadataBuffers.get_buf.__wrapped__
        for row in (0, 3):
            ours, theirs = buffers.get_buf(row), stock(buffers, row)
            self.assertEqual(len(ours), len(theirs))
            for got, wanted in zip(ours, theirs, strict=True):
                wanted = None if wanted is None else wanted.tolist()
                self.assertEqual(None if got is None else got.tolist(), wanted)
            self.assertEqual(ours[-1][0].item(), theirs[-1][0].item())

    def test_scalars_are_read_from_the_row_as_it_is_now(self):
        buffers = self.buffers()
        buffers.get_buf(2)
        buffers.bootstrap_room[2, 0] = 2**63 + 5
        self.assertEqual(buffers.get_buf(2)[-1][0].item(), 2**63 + 5)

    def test_fields_that_the_commit_keeps_are_not_shared(self):
        with mock.patch.dict("os.environ", {"SGLANG_ENABLE_DISAGG_SAMPLING_MASK": "1"}):
            buffers = self.buffers()
        kept = getattr(buffers, "output_token_sampling_mask_idx", None)
        if kept is None:
            self.skipTest("this release sends no sampling mask")
        addresses = [f.data_ptr() for f in buffers.get_buf(1) if isinstance(f, torch.Tensor)]
        self.assertNotIn(kept[1].data_ptr(), addresses)


class TestThePrebuiltBatch(DecodeSideTest):
    def take(self, side, reqs):
        return draft_rows.take(
            SimpleNamespace(reqs=reqs, device="cpu", req_to_token_pool=side.rows)
        )

    def test_rows_come_in_batch_order(self):
        side = self.serve()
        reqs = self.committed(side, "a", "b", "c")
        rows = self.take(side, [reqs[2], reqs[0], reqs[1]])
        self.assertEqual(draft_rows.topk_p(rows, 2).tolist(), [[3, 3], [1, 1], [2, 2]])
        self.assertEqual(draft_rows.topk_index(rows, 1).tolist(), [[3], [1], [2]])
        self.assertEqual(draft_rows.hidden_states(rows)[:, -1].tolist(), [3, 1, 2])

    def test_a_field_takes_one_operation_however_many_requests(self):
        side = self.serve(size=8)
        self.committed(side, *"abcdefgh")
        with (
            mock.patch.object(torch, "index_select", wraps=torch.index_select) as gathers,
            mock.patch.object(torch, "stack", side_effect=AssertionError("one by one")),
        ):
            side.prebuild()
        self.assertEqual(gathers.call_count, 3)

    def test_the_batch_is_a_copy_of_its_rows(self):
        side = self.serve()
        (req,) = self.committed(side, "a")
        row = req.metadata_slot.index
        built = side.prebuild()
        side.write(row, 1, 9)
        self.assertEqual(built.spec_info.hidden_states.unique().tolist(), [1])
        self.assertEqual(built.spec_info.topk_p.unique().tolist(), [1])

    def test_a_request_without_a_row_takes_a_neutral_one(self):
        side = self.serve()
        owner, rowless = self.running(side, "a", "b")
        (owner,) = self.committed(side, "c")
        for reqs in ([owner, rowless], [rowless], [rowless, rowless]):
            rows = self.take(side, reqs)
            own = reqs.index(rowless)
            self.assertEqual(draft_rows.topk_p(rows, 2)[own].tolist(), [0, 0])
            self.assertEqual(draft_rows.topk_index(rows, 2)[own].tolist(), [0, 1])
            self.assertEqual(draft_rows.hidden_states(rows)[own].tolist(), [0] * side.hidden)
            self.assertEqual(draft_rows.hidden_states(rows).dtype, torch.bfloat16)
        self.assertEqual(
            draft_rows.topk_p(self.take(side, [rowless, owner]), 2)[1].tolist(), [1, 1]
        )

    def test_a_request_without_a_row_brings_better_state_when_it_has_some(self):
        side = self.serve()
        (req,) = self.running(side, "a")
        req.output_topk_p = torch.tensor([0.5, 0.25])
        req.output_topk_index = torch.tensor([40, 41])
        req.hidden_states_tensor = torch.full((side.hidden,), 2.0)
        rows = self.take(side, [req])
        self.assertEqual(draft_rows.topk_p(rows, 2).tolist(), [[0.5, 0.25]])
        self.assertEqual(draft_rows.topk_index(rows, 1).tolist(), [[40]])
        self.assertEqual(draft_rows.hidden_states(rows)[0].tolist(), [2.0] * side.hidden)


class TestWaysOut(DecodeSideTest):
    """Every way out gives the row back exactly once; together with the request row and the KV."""

    def test_abort_in_the_prealloc_queue_took_no_row(self):
        side = self.serve(slots=1)
        side.arrive("a", 1)
        side.arrive("b", 2)
        side.poll()
        side.abort("b")
        side.poll()
        self.assertEqual(side.slots.counts()["transferring"], 1)
        side.arrived("a")
        side.turns()
        side.check_all_free()

    def test_abort_in_the_transfer_queue(self):
        side = self.serve()
        req = side.arrive("a", 1)
        side.poll()
        side.abort("a")
        side.abort("a")
        side.poll()
        self.assertIsNone(side.status(req))
        side.abort("a")
        side.poll()
        side.check_all_free()
        self.assertEqual(side.slots.counts()["quarantined"], 1)
        side.now += LIMIT
        self.assertEqual(side.slots.counts()["free"], side.slots.size)

    def test_abort_in_the_waiting_queue(self):
        side = self.serve()
        (req,) = self.committed(side, "a")
        side.abort("a")
        side.abort("a")
        self.assertIsNone(side.status(req))
        self.assertIsNone(req.hidden_states_tensor)
        side.check_all_free()
        self.assertEqual(side.slots.counts()["free"], side.slots.size)

    def test_abort_between_the_prebuilt_batch_and_its_result(self):
        side = self.serve()
        req, other = self.committed(side, "a", "b")
        side.prebuild()
        side.scheduler.last_batch = side.unprocessed
        side.abort("a")
        self.assertIs(side.status(req), Status.PREBUILT)
        side.first_result()
        self.assertIsNone(side.status(req))
        self.assertIsNone(side.status(other))
        side.turns()
        side.check_all_free()

    def test_abort_while_running(self):
        side = self.serve()
        self.running(side, "a", "b", max_new_tokens=50)
        side.abort("a")
        side.turns(2)
        self.assertEqual(side.running(), ["b"])
        side.abort("b")
        side.turns(2)
        side.check_all_free()

    def test_retraction_before_the_first_result(self):
        side = self.serve()
        req, _ = self.committed(side, "a", "b")
        side.prebuild()
        if side.running():  # 0.5.9 merges one turn later
            side.retract(req)
            self.assertIsNone(side.status(req))
            self.assertIsNone(req.output_topk_p)
        side.first_result()
        side.turns()
        side.check_all_free()

    def test_a_resumed_request_drafts_from_a_neutral_row(self):
        side = self.serve()
        req, _ = self.running(side, "a", "b", max_new_tokens=20)
        side.retract(req)
        side.poll()
        built = side.prebuild()
        self.assertEqual([r.rid for r in built.reqs], ["a"])
        self.assertEqual(built.spec_info.topk_index.tolist(), [[0, 1]])
        self.assertEqual(built.spec_info.hidden_states.unique().tolist(), [0])
        side.turns(30)
        side.check_all_free()

    def test_abort_of_a_retracted_request(self):
        side = self.serve()
        req, _ = self.running(side, "a", "b", max_new_tokens=20)
        side.retract(req)
        side.abort("a")
        side.abort("a")
        self.assertEqual(side.prealloc.retracted_queue, [])
        side.turns(30)
        side.check_all_free()

    def test_a_finished_transfer_waits_behind_retracted_requests(self):
        """sglang#31800: behind a retracted request nothing is committed, and nothing is lost."""
        side = self.serve(size=2, pre_alloc=0)
        req, other = self.running(side, "a", "b", max_new_tokens=20)
        side.retract(req)
        side.retract(other)
        late = side.arrive("late", 500)
        held, side.rows.free_slots = side.rows.free_slots, []
        side.poll()
        self.assertIsNone(side.status(late))
        side.rows.free_slots = held
        side.turns(30)
        side.arrived("late")
        side.turns(30)
        side.check_all_free()

    def test_a_rebootstrapped_request_gets_a_new_row(self):
        side = self.serve()
        req, _ = self.running(side, "a", "b", max_new_tokens=20)
        side.retract(req, backup=False)
        side.poll()
        self.assertIs(side.status(req), Status.TRANSFERRING)
        self.assertEqual(req.metadata_slot.owner, "a")
        side.arrived("a", 8)
        side.poll()
        self.assertEqual(side.prebuild().spec_info.topk_p.tolist(), [[8, 8]])
        side.first_result()
        side.turns(30)
        side.check_all_free()

    def test_retraction_from_the_waiting_queue(self):
        """pause_generation takes staged requests too (0.5.22): through the same release."""
        side = self.serve()
        (req,) = self.committed(side, "a")
        side.scheduler.waiting_queue.clear()
        release_kv_cache(req, side.tree, insert=False)
        req.reset_for_retract()
        self.assertIsNone(side.status(req))
        side.check_all_free()

    def test_finish_in_the_prebuilt_step(self):
        side = self.serve()
        (req,) = self.committed(side, "a", max_new_tokens=1)
        side.turns(3)
        self.assertTrue(req.finished())
        side.check_all_free()
        self.assertEqual(side.slots.counts()["free"], side.slots.size)

    def test_a_batch_of_one_that_goes_on_one_that_breaks_and_one_that_ends(self):
        """sglang#18822 (grammar), sglang#12151 (the first token is the last)."""
        side = self.serve()
        goes_on, breaks, ends = self.committed(side, "a", "b", "c", max_new_tokens=3)
        ends.sampling_params.max_new_tokens = 1
        breaks.grammar = mock.MagicMock(current_token=None, finished=False)
        breaks.grammar.accept_token.side_effect = ValueError("not in the grammar")
        side.prebuild()
        side.first_result()
        self.assertEqual(side.running(), ["a"])
        self.assertTrue(breaks.finished() and ends.finished() and not goes_on.finished())
        self.assertEqual(side.slots.counts()["free"], side.slots.size)
        self.assertEqual(side.rows.available_size(), side.rows.size + side.rows.pre_alloc_size - 1)
        side.turns()
        side.check_all_free()

    def test_an_exception_anywhere_in_the_prebuilt_step(self):
        mixin = ScheduleBatchDisaggregationDecodeMixin
        places = [
            (mixin, "prepare_for_prebuilt"),
            (mixin, "process_prebuilt"),
            (draft_rows, "hidden_states"),
            (ResultProcessor, "process_batch_result_prebuilt"),
        ]
        for target, name in places:
            with self.subTest(name):
                side = self.serve()
                reqs = self.committed(side, "a", "b")
                broken = mock.patch.object(target, name, side_effect=ZeroDivisionError)
                with broken, self.assertRaises(ZeroDivisionError):
                    side.turns(2)
                self.assertEqual([side.status(req) for req in reqs], [None, None])
                self.assertEqual(side.slots.counts()["free"], side.slots.size)
                side.close()

    def test_an_exception_leaves_the_rows_of_those_who_still_wait(self):
        side = self.serve(size=1, pre_alloc=4)
        first, second = self.committed(side, "a", "b")
        broken = mock.patch.object(
            ScheduleBatchDisaggregationDecodeMixin, "process_prebuilt", side_effect=KeyError
        )
        with broken, self.assertRaises(KeyError):
            side.schedule()
        self.assertIsNone(side.status(first))
        self.assertIs(side.status(second), Status.WAITING)

    def test_a_failed_transfer(self):
        side = self.serve()
        req = side.arrive("a", 1)
        side.poll()
        side.fail("a")
        side.poll()
        self.assertIsNone(side.status(req))
        side.check_all_free()

    def test_a_row_with_somebody_elses_room(self):
        side = self.serve()
        req = side.arrive("a", 1)
        side.poll()
        side.arrived("a")
        side.write(side.entry("a").metadata_buffer_index, 99, 5)
        side.poll()
        self.assertTrue(req.finished())
        self.assertIsNone(req.output_topk_p)
        side.check_all_free()

    @unittest.skipUnless(HAS_CHECKSUM, "this release has no KV checksum")
    def test_checksum_drop(self):
        side = self.serve()
        (req,) = self.committed(side, "a")
        side.scheduler.waiting_queue.clear()
        with mock.patch.object(decode, "is_in_ci", lambda: False):
            side.scheduler._handle_kv_checksum_mismatch(req, "mismatch")
        self.assertIsNone(side.status(req))
        side.check_all_free()

    @unittest.skipUnless(HAS_DEFERRED, "this release releases at once")
    def test_a_deferred_release_frees_the_row_when_the_sender_has_drained(self):
        side = self.serve()
        side.manager.enable_deferred_decode_kv_release = True
        side.transfer.enable_deferred_kv_release = True
        req = side.arrive("a", 1)
        side.poll()
        side.abort("a")
        side.entry("a").kv_receiver.bootstrap_infos = ("rank 0",)
        side.poll()
        self.assertIs(side.status(req), Status.TRANSFERRING)
        side.manager.drained.add(1)
        side.poll()
        side.check_all_free()
        self.assertEqual(side.slots.counts()["free"], side.slots.size)

    @unittest.skipUnless(HAS_QUEUE_DROP, "this release keeps its queues")
    def test_a_dropped_queue_shuts_its_rows_away(self):
        side = self.serve()
        side.arrive("a", 1)
        side.poll()
        side.transfer.release_memory_occupation()
        side.slots.check_integrity()
        self.assertEqual(side.slots.counts()["quarantined"], 1)
        side.now += LIMIT
        self.assertEqual(side.slots.counts()["free"], side.slots.size)

    def test_role_switch(self):
        side = self.serve()
        self.running(side, "a")
        side.turns()
        side.check_all_free()
        side.take_role()
        self.assertIs(side.rows.metadata_slots, side.slots)
        (req,) = self.committed(side, "b")
        self.assertIs(req.metadata_slot.pool, side.slots)
        side.turns()
        side.check_all_free()


class TestWhoMayWrite(DecodeSideTest):
    def test_the_room_of_the_last_owner_is_not_the_next_ones(self):
        """sglang#27374: a stale room made healthy requests look corrupt."""
        side = self.serve(slots=1)
        self.running(side, "a", max_new_tokens=2)
        side.turns()
        req = side.arrive("b", 22)
        side.poll()
        row = side.entry("b").metadata_buffer_index
        self.assertEqual(int(side.buffers.bootstrap_room[row, 0]), 0)
        side.kv_arrived("b")
        side.poll()
        side.poll()
        self.assertFalse(req.finished())
        self.assertEqual(side.waiting(), [])
        side.arrived("b", 6)
        side.poll()
        self.assertEqual(side.waiting(), ["b"])

    def test_an_aborted_senders_row_is_handed_out_only_after_its_limit(self):
        """sglang#35049: chunks kept landing in memory of an aborted request."""
        side = self.serve(slots=1)
        side.arrive("a", 1)
        side.poll()
        row = side.entry("a").metadata_buffer_index
        side.abort("a")
        side.poll()
        req = side.arrive("b", 2)
        side.write(row, 1, 66)  # late
        side.poll()
        self.assertIsNone(side.status(req))
        side.now += LIMIT / 2
        side.write(row, 1, 67)  # later
        side.poll()
        self.assertIsNone(side.status(req))
        side.now += LIMIT / 2
        side.poll()
        self.assertIs(side.status(req), Status.TRANSFERRING)
        self.assertEqual(int(side.buffers.bootstrap_room[row, 0]), 0)
        side.arrived("b", 5)
        side.turns()
        self.assertTrue(req.finished())
        side.check_all_free()

    def test_free_rows_go_first(self):
        side = self.serve(slots=2)
        side.arrive("a", 1)
        side.poll()
        row = side.entry("a").metadata_buffer_index
        side.abort("a")
        side.poll()
        side.now += 2 * LIMIT
        side.arrive("b", 2)
        side.poll()
        self.assertNotEqual(side.entry("b").metadata_buffer_index, row)

    def test_ranks_agree_on_how_many_rows_come_out_of_quarantine(self):
        side = self.serve(slots=2)
        for rid in ("a", "b"):
            side.arrive(rid, 1)
        side.poll()
        side.abort("a")
        side.abort("b")
        side.poll()
        side.now += LIMIT

        def slower_rank(counts, **_):
            counts.clamp_(max=1)

        with (
            mock.patch.object(torch.distributed, "get_world_size", return_value=2),
            mock.patch.object(torch.distributed, "all_reduce", slower_rank),
        ):
            self.assertEqual(side.slots.available_size(), 1)


class TestRefusals(unittest.TestCase):
    def setUp(self):
        self.pool = SlotPool(1)

    def refused(self, call, *owners):
        with self.assertRaises(SlotError) as caught:
            call()
        for owner in owners:
            self.assertIn(owner, str(caught.exception))
        self.pool.check_integrity()

    def test_a_second_release_names_both_owners(self):
        first = self.pool.lease("first")
        self.assertIs(first.release(by="first"), Verdict.FREED)
        second = self.pool.lease("second")
        self.refused(lambda: first.release(by="first"), "'first'", "'second'")
        self.assertIs(self.pool.holders[0], second)

    def test_a_stranger_cannot_release(self):
        slot = self.pool.lease("owner")
        self.refused(lambda: slot.release(by="stranger"), "'owner'", "'stranger'")

    def test_a_read_after_release_is_refused(self):
        first = self.pool.lease("first")
        first.hand_over()
        first.read()
        first.release(by="first")
        self.pool.lease("second")
        self.refused(first.read, "'first'", "'second'")

    def test_a_row_that_has_not_arrived_cannot_be_read(self):
        self.refused(self.pool.lease("first").read, "'first'")

    def test_a_held_row_cannot_be_freed_by_index(self):
        slot = self.pool.lease("owner")
        self.refused(lambda: self.pool.free(slot.index), "'owner'")

    def test_an_index_cannot_be_freed_twice(self):
        index = self.pool.alloc()
        self.pool.free(index)
        self.refused(lambda: self.pool.free(index))
        self.assertEqual(self.pool.available_size(), 1)

    def test_a_request_cannot_have_two_rows(self):
        queue = SimpleNamespace(req_to_metadata_buffer_idx_allocator=self.pool)
        entry = SimpleNamespace(req=SimpleNamespace(rid="greedy"))
        metadata_slots.allocate(queue, entry)
        self.refused(lambda: metadata_slots.allocate(queue, entry), "'greedy'")

    def test_a_queue_entry_cannot_let_go_twice(self):
        queue = SimpleNamespace(req_to_metadata_buffer_idx_allocator=self.pool)
        req = Req.__new__(Req)
        req.rid, req.finished_reason = "once", None
        entry = SimpleNamespace(req=req)
        entry.metadata_buffer_index = metadata_slots.allocate(queue, entry)
        self.assertIs(metadata_slots.leave_queue(entry), Verdict.FREED)
        self.refused(lambda: metadata_slots.leave_queue(entry), "'once'")

    def test_a_lease_knows_its_generation(self):
        generations = []
        for owner in ("a", "b", "c"):
            slot = self.pool.lease(owner)
            generations.append((slot.index, slot.generation))
            slot.release(by=owner)
        self.assertEqual(generations, [(0, 1), (0, 2), (0, 3)])


if __name__ == "__main__":
    unittest.main()
