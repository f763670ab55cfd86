# SPDX-License-Identifier: Apache-2.0
"""Decode takes in no transfer of another prompt, on no rank, and says how the two differ."""

import sys
import unittest
from array import array
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from sglang.srt.disaggregation import pair_agreement
from sglang.srt.disaggregation import utils as disagg_utils
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.test.ci.ci_register import register_cpu_ci

sys.path.insert(0, str(Path(__file__).parent))
try:
    from decode_side import PROMPT, DecodeSide
except ImportError:  # comes with metadata-slots
    DecodeSide = None

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

ROOM = 0x7FFF_FFFF_0000_0001


def prompt(*ids, **fields):
    """A request with these token ids."""
    return SimpleNamespace(
        **{
            "origin_input_ids": array("q", ids),
            "multimodal_inputs": None,
            "bootstrap_host": "10.0.0.7",
            "bootstrap_room": ROOM,
            "finished_reason": None,
            "to_finish": None,
            **fields,
        }
    )


class TestSignature(unittest.TestCase):
    def differ(self, one, other):
        signatures = [pair_agreement.signature(each) for each in (one, other)]
        return pair_agreement.difference(*signatures)

    def test_equal_prompts_agree_however_they_are_kept(self):
        self.assertIsNone(self.differ(prompt(5, 6, 7), prompt(5, 6, 7)))
        listed = prompt(origin_input_ids=[5, 6, 7])
        self.assertIsNone(self.differ(prompt(5, 6, 7), listed))

    def test_lengths_and_tokens_that_differ_are_named(self):
        self.assertIn("prefill has 3 prompt tokens", self.differ(prompt(5, 6, 7), prompt(5, 6)))
        self.assertIn("decode has 2", self.differ(prompt(5, 6, 7), prompt(5, 6)))
        self.assertIsNotNone(self.differ(prompt(5, 6, 7), prompt(5, 6, 8)))
        self.assertIsNotNone(self.differ(prompt(5, 6, 7), prompt(6, 5, 7)))

    def test_hashes_of_features_are_compared_by_number_alone(self):
        pictures = [prompt(5, hash_, 7, multimodal_inputs=object()) for hash_ in (111, 222)]
        self.assertIsNone(self.differ(*pictures))
        self.assertIsNotNone(self.differ(pictures[0], prompt(5, 6)))

    def test_a_signature_fits_its_word_and_is_never_the_mark_of_none(self):
        for length in (1, 2, 10**6):
            value = pair_agreement.signature(prompt(origin_input_ids=array("q", [0]) * length))
            self.assertTrue(0 < value < 2**63)


@unittest.skipUnless(DecodeSide, "needs the decode side of metadata-slots")
class DecodeSideTest(unittest.TestCase):
    def setUp(self):
        self.side = DecodeSide()
        self.addCleanup(self.side.close)
        self.reasons = {}
        self.side.manager.record_failure = self.reasons.__setitem__

    def received(self, other=None, room=100, **how):
        """A request of decode whose transfer is finished, with the row that prefill wrote."""
        req = self.side.arrive("a", room, **how)
        self.side.poll()
        entry = self.side.entry("a")
        entry.kv_receiver.failure_exception = self.raises
        self.side.arrived("a")
        if other is not None:
            row = self.side.buffers.bootstrap_room[entry.metadata_buffer_index]
            row[pair_agreement.PROMPT] = pair_agreement.signature(other)
        return req, entry

    def raises(self):
        raise RuntimeError(self.reasons[100])


class TestTransfer(DecodeSideTest):
    def test_the_same_prompt_is_taken_in(self):
        self.received(prompt(*range(PROMPT)))
        self.side.poll()
        self.assertEqual(self.side.waiting(), ["a"])
        self.assertEqual(self.reasons, {})

    def test_another_prompt_fails_with_both_values_and_holds_nothing(self):
        for other in (prompt(*range(PROMPT - 1)), prompt(*range(1, PROMPT + 1))):
            with self.subTest(length=len(other.origin_input_ids)):
                self.setUp()
                req, _ = self.received(other)
                self.side.poll()
                self.assertEqual(self.side.waiting(), [])
                self.assertIn(f"decode has {PROMPT}", req.finished_reason.message)
                length = len(other.origin_input_ids)
                self.assertIn(f"prefill has {length}", req.finished_reason.message)
                self.side.check_all_free()

    def test_an_end_that_says_nothing_is_believed(self):
        self.received()
        self.side.poll()
        self.assertEqual(self.side.waiting(), ["a"])

    def test_a_row_that_is_not_written_is_not_looked_at(self):
        _, entry = self.received(prompt(1, 2))
        self.side.buffers.bootstrap_room[entry.metadata_buffer_index, pair_agreement.ROOM] = 0
        self.side.poll()
        self.assertEqual(self.reasons, {})

    def test_prefill_signs_the_row_of_its_request(self):
        req = self.side.arrive("p", 100)
        req.metadata_buffer_index = 2
        req.output_ids.append(7)
        self.side.buffers.set_buf(req)
        row = self.side.buffers.bootstrap_room[2]
        self.assertEqual(int(row[pair_agreement.ROOM]), 100)
        self.assertEqual(
            int(row[pair_agreement.PROMPT]), pair_agreement.signature(prompt(*range(PROMPT)))
        )


class TestVote(DecodeSideTest):
    def votes(self, **fields):
        """What this rank says of a finished transfer of another prompt."""
        _, entry = self.received(prompt(1, 2))
        for name, value in fields.items():
            setattr(entry if name == "is_rebootstrap" else entry.req, name, value)
        polls = [int(KVPoll.Success)]
        with mock.patch.object(disagg_utils, "_is_fake_transfer", lambda *_: False):
            pair_agreement.compare(polls, [entry], self.side.buffers)
        return polls[0]

    def test_one_rank_that_finds_another_prompt_fails_it_on_all(self):
        ranks = [self.votes(), int(KVPoll.Success)]
        self.assertEqual(min(ranks), int(KVPoll.Failed))

    def test_what_prefill_computes_beyond_the_prompt_is_no_difference(self):
        self.assertEqual(self.votes(is_rebootstrap=True), int(KVPoll.Success))

    def test_a_stub_of_a_refused_request_keeps_its_own_reason(self):
        self.assertEqual(self.votes(to_finish=object()), int(KVPoll.Success))

    def test_a_request_without_another_end_is_not_compared(self):
        self.assertEqual(self.votes(bootstrap_host=FAKE_BOOTSTRAP_HOST), int(KVPoll.Success))
        self.assertEqual(pair_agreement.FAKE_HOST, FAKE_BOOTSTRAP_HOST)


if __name__ == "__main__":
    unittest.main()
