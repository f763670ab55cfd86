# SPDX-License-Identifier: Apache-2.0
"""A row that is not written yet holds its transfer back on every rank (SGLang up to 0.5.12)."""

import sys
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.disaggregation import metadata_gate, utils
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.fake import FakeKVReceiver
from sglang.srt.disaggregation.metadata_slots import Status
from sglang.test.ci.ci_register import register_cpu_ci

sys.path.insert(0, str(Path(__file__).parent))
from decode_side import DecodeSide

register_cpu_ci(est_time=12, suite="base-a-test-cpu")


class TestMetadataGate(unittest.TestCase):
    def setUp(self):
        self.sides = [DecodeSide(), DecodeSide()]
        for side in reversed(self.sides):
            self.addCleanup(side.close)
        self.reqs = [side.arrive("a", 11) for side in self.sides]
        self.each(lambda side: side.poll())

    def each(self, act):
        return [act(side) for side in self.sides]

    def vote(self):
        """Both ranks poll; each reduces with what the other rank would have said at that moment."""
        said = []

        def heard(values, **_):
            said.append(values.clone())

        queues = [side.transfer.queue for side in self.sides]
        with mock.patch.object(torch.distributed, "all_reduce", heard):
            for queue in queues:
                utils.poll_and_all_reduce(metadata_gate.pollers(queue), None)
        agreed = torch.stack(said).min(dim=0).values

        def reduced(values, **_):
            if values.shape == agreed.shape:
                values.copy_(agreed)

        with mock.patch.object(torch.distributed, "all_reduce", reduced):
            self.each(lambda side: side.poll())

    def succeed(self, side, written):
        (side.arrived if written else side.kv_arrived)("a")

    def test_ranks_commit_together_when_the_last_row_has_arrived(self):
        first, second = self.sides
        self.succeed(first, written=True)
        self.succeed(second, written=False)
        self.vote()
        self.assertEqual(self.each(DecodeSide.waiting), [[], []])
        self.assertEqual(self.each(lambda side: len(side.transfer.queue)), [1, 1])
        second.arrived("a")
        self.vote()
        self.assertEqual(self.each(DecodeSide.waiting), [["a"], ["a"]])

    def test_an_unwritten_row_is_not_corruption(self):
        for side in self.sides:
            self.succeed(side, written=False)
        for _ in range(3):
            self.vote()
        self.assertEqual([req.finished() for req in self.reqs], [False, False])
        self.assertEqual(
            [side.status(req) for side, req in zip(self.sides, self.reqs, strict=True)],
            [Status.TRANSFERRING] * 2,
        )

    def test_a_queue_polls_through_the_gate(self):
        side = self.sides[0]
        self.succeed(side, written=False)
        with mock.patch.object(
            side.transfer, "_commit_transfer_to_req", side_effect=AssertionError("committed")
        ):
            side.poll()
        self.assertEqual(len(side.transfer.queue), 1)

    def test_other_states_pass(self):
        entry = self.sides[0].entry("a")
        for state in (KVPoll.Failed, KVPoll.Transferring, KVPoll.WaitingForInput):
            entry.kv_receiver.state = state
            self.assertEqual(metadata_gate.poll(entry), int(state))

    def test_a_fake_transfer_has_no_room_to_wait_for(self):
        receiver = FakeKVReceiver.__new__(FakeKVReceiver)
        receiver.poll = lambda: KVPoll.Success
        entry = SimpleNamespace(kv_receiver=receiver, req=None)
        self.assertEqual(metadata_gate.poll(entry), int(KVPoll.Success))

    @unittest.skipUnless(
        hasattr(utils, "poll_and_all_reduce_with_staging"), "this release has no staging"
    )
    def test_staged_transfers_wait_for_their_rows_too(self):
        side = self.sides[0]
        self.succeed(side, written=False)
        handler = SimpleNamespace(is_done=lambda _: True, advance_scatter=lambda _: None)
        group = side.transfer.gloo_group
        polls = utils.poll_and_all_reduce_with_staging(side.transfer.queue, handler, group)
        self.assertEqual(polls, [int(KVPoll.Transferring)])
        side.arrived("a")
        polls = utils.poll_and_all_reduce_with_staging(side.transfer.queue, handler, group)
        self.assertEqual(polls, [int(KVPoll.Success)])


if __name__ == "__main__":
    unittest.main()
