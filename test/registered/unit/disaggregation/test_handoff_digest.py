# SPDX-License-Identifier: Apache-2.0
"""A metadata row that is not what prefill put into it is noticed, and named, before it is read."""

import copy
import functools
import inspect
import os
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from sglang.srt.disaggregation import handoff_digest
from sglang.srt.disaggregation.handoff_digest import Stage, Verdict
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, MetadataBuffers
from sglang.test.ci.ci_register import register_cpu_ci

sys.path.insert(0, str(Path(__file__).parent))
from decode_side import TOKEN, DecodeSide

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

ROOM = 0x7FFF_FFFF_0000_0001
TOPK = 2
DRAFT_FIELDS = ("output_topk_p", "output_topk_index", "output_hidden_states")
HAS_DSA = "output_dsa_topk_indices_dim" in MetadataBuffers.__init__.__code__.co_varnames


class DigestTest(unittest.TestCase):
    def set(self, policy="log", rate=None):
        """From now on buffers are built with these settings."""
        settings = {handoff_digest.POLICY: policy, handoff_digest.RATE: rate}
        given = {name: value for name, value in settings.items() if value is not None}
        patch = mock.patch.dict(os.environ, given)
        patch.start()
        self.addCleanup(patch.stop)

    def serve(self, **how):
        side = DecodeSide(**how)
        self.addCleanup(side.close)
        return side

    def buffers(self, side, rows=4):
        """Metadata buffers as a prefill server of the same model has them."""
        optional = {"output_dsa_topk_indices_dim": side.dsa, "max_sampling_mask_tokens": 16}
        known = inspect.signature(MetadataBuffers.__init__).parameters
        more = {name: value for name, value in optional.items() if name in known}
        return MetadataBuffers(rows, side.hidden, torch.bfloat16, **more)

    def fill(self, side, buffers, req, row=1, value=1.0):
        """Prefill has computed `req` and puts what it hands over into a row."""
        done = copy.copy(req)
        done.output_ids, done.metadata_buffer_index = [TOKEN], row
        done.output_topk_p = torch.full((TOPK,), value)
        done.output_topk_index = torch.full((TOPK,), int(value), dtype=torch.int64)
        done.hidden_states_tensor = torch.full((side.hidden,), value, dtype=torch.bfloat16)
        done.output_dsa_topk_indices = torch.arange(side.dsa, dtype=torch.int32)
        buffers.set_buf(done)
        return row

    def send(self, side, buffers, row, entry):
        """The row travels: every registered field, whole, as the transfer backends send it."""
        ours, theirs = (copied(each) for each in (side.buffers, buffers))
        for mine, sent in zip(ours, theirs, strict=True):
            mine[entry.metadata_buffer_index] = sent[row]
        side.kv_arrived(entry.req.rid)

    def handed_over(self, side, *rids, buffers=None, fault=None):
        """Requests whose signed rows were sent and committed; `fault` spoils a row on the way."""
        buffers = buffers or self.buffers(side)
        reqs = [side.arrive(rid, ROOM + i) for i, rid in enumerate(rids)]
        side.poll()
        for i, req in enumerate(reqs):
            entry = side.entry(req.rid)
            self.send(side, buffers, self.fill(side, buffers, req, value=i + 1.0), entry)
            if fault is not None:
                fault(entry.metadata_buffer_index)
        side.poll()
        return reqs

    def tally(self, side):
        tally = handoff_digest.of(side.buffers).tally
        return {(stage.value, verdict.value): n for (stage, verdict), n in tally.items()}


def copied(buffers):
    """The registered fields of the buffers, each `[rows, bytes]` over its own memory."""
    pointers, lengths, _ = buffers.get_buf_infos()
    fields = [value for value in vars(buffers).values() if isinstance(value, torch.Tensor)]
    by_pointer = {field.data_ptr(): field for field in fields}
    assert [by_pointer[pointer].nbytes for pointer in pointers] == lengths
    return [by_pointer[pointer].view(torch.uint8) for pointer in pointers]


def flip(field, row):
    """A bit of a row is not what it was."""
    field.view(torch.uint8)[row, 0] ^= 1


class TestPrefill(DigestTest):
    def test_a_row_carries_a_checksum_of_each_part_that_was_put_into_it(self):
        self.set()
        side = self.serve(dsa=4 if HAS_DSA else 0)
        buffers = self.buffers(side)
        row = self.fill(side, buffers, side.arrive("a", ROOM))
        words = buffers.bootstrap_room[row].numpy().view(np.uint32)
        draft = {5, 6, 7, 8} if HAS_DSA else {5, 6, 7}
        signed = {part for part in range(9) if int(words[4]) >> part & 1}
        self.assertEqual(int(words[4]) >> 16, handoff_digest.MARK)
        self.assertEqual(signed, {0, 1} | draft)
        self.assertTrue(all(int(words[5 + part]) for part in draft))

    def test_the_room_and_what_others_keep_beside_it_stay(self):
        self.set("off")
        side = self.serve()
        plain = self.buffers(side)
        self.set("log")
        signing = self.buffers(side)
        req = side.arrive("a", ROOM)
        for buffers in (plain, signing):
            self.fill(side, buffers, req)
        self.assertEqual(
            plain.bootstrap_room[1, :2].tolist(), signing.bootstrap_room[1, :2].tolist()
        )
        self.assertEqual(plain.bootstrap_room[1, 2:].tolist(), [0] * 6)

    def test_a_row_that_is_not_sampled_does_not_keep_the_last_owners_signature(self):
        self.set(rate="0.5")
        side = self.serve()
        buffers = self.buffers(side)
        digests = handoff_digest.of(buffers)
        rooms = range(1, 50)
        sampled = next(room for room in rooms if digests.samples(room))
        passed_over = next(room for room in rooms if not digests.samples(room))
        self.fill(side, buffers, side.arrive("a", sampled))
        self.assertTrue(buffers.bootstrap_room[1, 2].item())
        self.fill(side, buffers, side.arrive("b", passed_over))
        self.assertEqual(buffers.bootstrap_room[1, 2].item() & 0xFFFF_FFFF, 0)

    def test_no_row_is_copied_to_be_summed(self):
        self.set()
        side = self.serve()
        digests = handoff_digest.of(side.buffers)
        for names, fields in zip(handoff_digest.PARTS, digests._fields, strict=True):
            present = [getattr(side.buffers, name, None) for name in names]
            for rows, field in zip(fields, [f for f in present if f is not None], strict=True):
                self.assertEqual(rows.ctypes.data, field.data_ptr())


class TestSampling(DigestTest):
    def digests(self, rate):
        self.set(rate=rate)
        return handoff_digest.of(self.buffers(SimpleNamespace(hidden=8, dsa=0)))

    def test_rooms_in_a_row_are_sampled_at_the_rate(self):
        digests = self.digests("0.01")
        chosen = sum(digests.samples(room) for room in range(ROOM, ROOM + 20_000))
        self.assertTrue(150 < chosen < 250, chosen)

    def test_a_smaller_share_is_part_of_a_larger_one(self):
        few, many = self.digests("0.1"), self.digests("0.3")
        rooms = range(1, 2000)
        self.assertTrue(all(many.samples(room) for room in rooms if few.samples(room)))

    def test_all_and_none(self):
        digests = self.digests("1")
        self.assertTrue(all(digests.samples(room) for room in (None, 1, ROOM, 2**63)))
        self.assertIsNone(self.digests("0"))


class TestSettings(DigestTest):
    def test_off_is_the_default_and_leaves_nothing_behind(self):
        side = self.serve()
        self.assertIsNone(handoff_digest.of(side.buffers))
        (req,) = self.handed_over(side, "a")
        side.prebuild()
        self.assertFalse(hasattr(req, "handoff_receipt"))

    def test_what_is_no_setting_is_refused_by_name(self):
        for policy, rate, named in (
            ("maybe", "1", "maybe"),
            ("log", "10", "10"),
            ("log", "x", "x"),
        ):
            with self.subTest(policy=policy, rate=rate), self.assertRaisesRegex(ValueError, named):
                self.set(policy, rate)
                self.buffers(SimpleNamespace(hidden=8, dsa=0))

    def test_rows_on_a_device_are_passed_over_with_one_note(self):
        self.set()
        buffers = SimpleNamespace()

        def init(buffers):
            buffers.bootstrap_room = torch.zeros(2, 8, dtype=torch.int64, device="meta")

        with self.assertLogs(handoff_digest.logger, "WARNING") as logs:
            handoff_digest.attached(init)(buffers)
        self.assertIsNone(handoff_digest.of(buffers))
        self.assertEqual(len(logs.output), 1)
        self.assertIn("meta", logs.output[0])


class TestDecode(DigestTest):
    def test_what_arrives_as_it_was_sent_is_looked_at_twice_and_passes(self):
        self.set("abort")
        side = self.serve(dsa=4 if HAS_DSA else 0)
        reqs = self.handed_over(side, "a", "b")
        with self.assertNoLogs(handoff_digest.logger, "WARNING"):
            side.prebuild()
            side.first_result()
        self.assertEqual(self.tally(side), {("commit", "match"): 2, ("consume", "match"): 2})
        self.assertFalse(any(req.finished() for req in reqs))

    def test_a_row_changed_between_commit_and_reading_is_named(self):
        self.set()
        side = self.serve(dsa=4 if HAS_DSA else 0)
        fields = (*DRAFT_FIELDS, "output_dsa_topk_indices") if HAS_DSA else DRAFT_FIELDS
        for i, name in enumerate(fields):
            with self.subTest(field=name):
                room = 500 + i
                req = side.arrive(f"r{i}", room)
                side.poll()
                buffers = self.buffers(side)
                self.send(side, buffers, self.fill(side, buffers, req), side.entry(req.rid))
                side.poll()
                slot = req.metadata_slot
                flip(getattr(side.buffers, name), slot.index)
                with self.assertLogs(handoff_digest.logger, "ERROR") as logs:
                    side.prebuild()
                (line,) = logs.output
                for part in (
                    f"at consume: {name} of request 'r{i}' (room {room})",
                    f"row {slot.index}",
                    f"generation {slot.generation} and held by 'r{i}'",
                ):
                    self.assertIn(part, line)
                sent, found = line.split("prefill sent ")[1].split(", the row holds ")
                self.assertNotEqual(sent, found)
                side.first_result()

    def test_a_row_that_arrives_changed_is_named_at_commit(self):
        self.set()
        side = self.serve()
        for name in ("output_ids", "cached_tokens", *DRAFT_FIELDS):
            with self.subTest(field=name), self.assertLogs(handoff_digest.logger, "ERROR") as logs:
                buffers = self.buffers(side)
                fault = functools.partial(flip, getattr(side.buffers, name))
                self.handed_over(side, name, buffers=buffers, fault=fault)
                self.assertIn(f"at commit: {name} of request '{name}'", logs.output[0])
                side.prebuild()
                side.first_result()

    def test_a_row_written_over_by_another_request_names_its_room(self):
        self.set()
        side = self.serve()
        (req,) = self.handed_over(side, "a")
        buffers = self.buffers(side)
        other = copy.copy(req)
        other.bootstrap_room = 777
        row = self.fill(side, buffers, other, value=9.0)
        for mine, sent in zip(copied(side.buffers), copied(buffers), strict=True):
            mine[req.metadata_slot.index] = sent[row]
        with self.assertLogs(handoff_digest.logger, "ERROR") as logs:
            side.prebuild()
        self.assertIn(f"the row holds {777:08x}", logs.output[0])
        self.assertIn("bootstrap_room of request 'a'", logs.output[0])

    def test_an_end_that_does_not_sign_is_not_checked_and_told_of_once(self):
        self.set("off")
        side = self.serve()
        silent = self.buffers(side)
        self.set("abort")
        side.take_role()
        with self.assertLogs(handoff_digest.logger, "WARNING") as logs:
            reqs = self.handed_over(side, "a", "b", buffers=silent)
            side.prebuild()
            side.first_result()
        self.assertEqual(len(logs.output), 1)
        self.assertEqual(self.tally(side), {("commit", "unsigned"): 2})
        self.assertFalse(any(req.finished() for req in reqs))

    def test_a_request_without_another_end_is_not_looked_at(self):
        self.set()
        side = self.serve()
        req = side.arrive("probe", 0)
        req.bootstrap_host = FAKE_BOOTSTRAP_HOST
        side.poll()
        with self.assertNoLogs(handoff_digest.logger, "WARNING"):
            handoff_digest.commit(side.buffers, req)
        self.assertEqual(self.tally(side), {})

    def test_a_resumed_request_has_no_row_to_look_at(self):
        self.set("abort")
        side = self.serve()
        (req,) = self.handed_over(side, "a")
        side.prebuild()
        side.first_result()
        side.retract(req)
        side.poll()
        side.prebuild()
        side.first_result()
        self.assertEqual(self.tally(side), {("commit", "match"): 1, ("consume", "match"): 1})
        self.assertFalse(req.finished())


class TestPolicy(DigestTest):
    def spoiled(self, policy, *rids):
        """The first request's hidden row changes after its commit; the batch is then built."""
        self.set(policy)
        side = self.serve()
        reqs = self.handed_over(side, *rids)
        flip(side.buffers.output_hidden_states, reqs[0].metadata_slot.index)
        return side, reqs

    def test_count_says_nothing_and_counts(self):
        side, (req,) = self.spoiled("count", "a")
        with self.assertNoLogs(handoff_digest.logger, "WARNING"):
            side.prebuild()
            side.first_result()
        digests = handoff_digest.of(side.buffers)
        self.assertEqual(digests.tally[Stage.CONSUME, Verdict.MISMATCH], 1)
        self.assertEqual(digests.mismatches[Stage.CONSUME, "output_hidden_states"], 1)
        self.assertFalse(req.finished())

    def test_log_lets_the_request_go_on(self):
        side, (req,) = self.spoiled("log", "a")
        with self.assertLogs(handoff_digest.logger, "ERROR"):
            side.prebuild()
        side.turns()
        self.assertEqual(len(req.output_ids), 4)
        side.check_all_free()

    def test_abort_ends_that_request_alone_before_its_first_step(self):
        side, (bad, good) = self.spoiled("abort", "a", "b")
        side.prebuild()
        side.first_result()
        side.turns()
        self.assertIn("output_hidden_states", bad.finished_reason.message)
        self.assertEqual(len(bad.output_ids), 1)
        self.assertEqual(len(good.output_ids), 4)
        self.assertEqual(good.finished_reason.to_json()["type"], "length")
        side.check_all_free()

    def test_abort_also_ends_what_was_wrong_at_commit(self):
        self.set("abort")
        side = self.serve(spec="NGRAM")
        hidden = side.buffers.output_ids
        (req,) = self.handed_over(side, "a", fault=lambda row: flip(hidden, row))
        self.assertIsNone(getattr(req, "metadata_slot", None))
        with mock.patch.object(
            side.scheduler.spec_algorithm.__class__, "is_eagle", lambda _: False
        ):
            handoff_digest.consume(SimpleNamespace(reqs=[req], req_to_token_pool=side.rows))
        self.assertIn("output_ids", req.to_finish.message)

    def test_what_another_rank_found_ends_the_request_here_too(self):
        self.set("abort")
        side = self.serve()
        (req,) = self.handed_over(side, "a")

        def reduce(flags, op, group):
            self.assertIs(op, torch.distributed.ReduceOp.MAX)
            self.assertIs(group, side.prealloc.gloo_group)
            flags.fill_(1)

        with (
            mock.patch.object(torch.distributed, "get_world_size", return_value=2),
            mock.patch.object(torch.distributed, "all_reduce", reduce),
        ):
            handoff_digest.consume(SimpleNamespace(reqs=[req], req_to_token_pool=side.rows))
        self.assertIn("another rank", req.to_finish.message)

    def test_ranks_are_asked_only_with_abort_and_only_about_sampled_requests(self):
        for policy, rate in (("log", "1"), ("count", "1"), ("abort", "0.000001")):
            with self.subTest(policy=policy):
                self.set(policy, rate)
                side = self.serve()
                (req,) = self.handed_over(side, "a")
                with mock.patch.object(handoff_digest, "_on_any_rank") as asked:
                    handoff_digest.consume(SimpleNamespace(reqs=[req], req_to_token_pool=side.rows))
                asked.assert_not_called()

    def test_the_internal_state_has_the_tally(self):
        side, _ = self.spoiled("count", "a")
        side.prebuild()
        reply = SimpleNamespace(internal_state={})
        wrapped = handoff_digest.add_counts(lambda *_: reply)
        counts = wrapped(side.scheduler).internal_state["handoff_digests"]
        self.assertEqual(counts, {"commit match": 1, "consume mismatch": 1})


if __name__ == "__main__":
    unittest.main()
