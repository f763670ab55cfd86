# SPDX-License-Identifier: Apache-2.0
"""A pass asks only those whose status was set, and decides as if it had asked everybody."""

import contextlib
import random
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from sglang.srt.disaggregation import prefill
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.test.ci.ci_register import register_cpu_ci

sys.path.insert(0, str(Path(__file__).parent))
try:
    import decode_side
    from sglang.srt.disaggregation import parked_requests
except ImportError:  # decode_side comes with metadata-slots
    decode_side = parked_requests = None

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

MANY = 100


class Table(mock.MagicMock):
    """A KV manager of which the table of statuses is SGLang's own."""

    def __init__(self, **fields):
        super().__init__(**fields)
        self.request_status = {}
        self.journals = ()
        self.asked = []
        self.disaggregation_mode = DisaggregationMode.DECODE
        self.deferred_bootstrap = None
        self.enable_deferred_decode_kv_release = False
        self.kv_args = SimpleNamespace(state_types=[])

    def set(self, room, status):
        CommonKVManager.update_status(self, room, status)

    def poll(self, room):
        self.asked.append(room)
        return self.request_status.get(room, KVPoll.Failed)

    def rooms_asked(self):
        """The rooms asked since the last call, each once."""
        rooms, self.asked = sorted(set(self.asked)), []
        return rooms


def table_receiver():
    """A receiver whose status is what the manager's table says."""

    class TableReceiver(decode_side.Receiver):
        def __init__(self, manager, room, status):
            self.bootstrap_room = room
            super().__init__(manager)
            manager.set(room, KVPoll.Bootstrapping)
            if status != KVPoll.Bootstrapping:
                manager.set(room, status)

        def poll(self):
            return self.kv_mgr.poll(self.bootstrap_room)

        def move_to(self, status):
            self.kv_mgr.set(self.bootstrap_room, status)

        def abort(self):
            self.kv_mgr.set(self.bootstrap_room, KVPoll.Failed)

    TableReceiver.poll.__module__ = parked_requests.TABLE_POLLS[0]
    return TableReceiver


def decode_server(manager, **sizes):
    """A decode side whose queues share `manager`."""
    with mock.patch.object(decode_side, "TransferManager", lambda: manager):
        return decode_side.DecodeSide(**sizes)


def arrive(side, room, status=KVPoll.Bootstrapping):
    """A request in its handshake, or beyond it."""
    req = side.arrive(name(room), room)
    entry = side.prealloc.queue[-1]
    entry.waiting_for_input = False
    entry.kv_receiver = table_receiver()(side.manager, room, status)
    return req


def name(room):
    """Padded, because an abort is for all requests whose name begins so."""
    return f"r{room:03}"


def rids(entries):
    return [entry.req.rid for entry in entries]


@unittest.skipUnless(decode_side, "needs the decode side of metadata-slots")
class Decode(unittest.TestCase):
    def setUp(self):
        self.now = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        self.enterContext(mock.patch.object(parked_requests, "time", clock))

    def server(self, **sizes):
        side = decode_server(Table(), **sizes)
        self.addCleanup(side.close)
        return side

    def parked(self, many=MANY, **sizes):
        """A server with `many` requests in their handshake, after its first pass."""
        side = self.server(**sizes)
        for room in range(1, many + 1):
            arrive(side, room)
        side.poll()
        self.assertEqual(len(side.manager.rooms_asked()), many)
        return side


class TestHandshakes(Decode):
    def test_a_pass_without_news_asks_nobody(self):
        side = self.parked()
        side.poll()
        self.assertEqual(side.manager.rooms_asked(), [])
        self.assertEqual(len(side.prealloc.queue), MANY)

    def test_one_whose_status_was_set_is_asked_and_admitted(self):
        side = self.parked()
        side.manager.set(50, KVPoll.WaitingForInput)
        side.poll()
        self.assertEqual(side.manager.rooms_asked(), [50])
        self.assertEqual(rids(side.transfer.queue), ["r050"])
        left = [name(room) for room in range(1, MANY + 1) if room != 50]
        self.assertEqual(rids(side.prealloc.queue), left)

    def test_a_failed_one_is_told_and_taken_out(self):
        side = self.parked()
        side.abort("r007")
        side.poll()
        self.assertNotIn("r007", rids(side.prealloc.queue))
        self.assertEqual(len(side.prealloc.queue), MANY - 1)

    def test_newcomers_are_asked(self):
        side = self.parked()
        arrive(side, MANY + 1, KVPoll.WaitingForInput)
        side.poll()
        self.assertEqual(side.manager.rooms_asked(), [MANY + 1])
        self.assertEqual(rids(side.transfer.queue), [name(MANY + 1)])

    def test_those_that_wait_for_a_row_are_not_asked_again(self):
        side = self.parked(size=4, pre_alloc=4)
        for room in range(1, MANY + 1):
            side.manager.set(room, KVPoll.WaitingForInput)
        side.poll()
        admitted = rids(side.transfer.queue)
        self.assertEqual(admitted, [name(room) for room in range(1, len(admitted) + 1)])
        side.manager.rooms_asked()
        side.poll()
        in_transfer = {entry.req.bootstrap_room for entry in side.transfer.queue}
        parked = set(side.manager.rooms_asked()) - in_transfer
        self.assertLessEqual(len(parked), 1)
        self.assertEqual(rids(side.prealloc.queue)[0], name(len(admitted) + 1))

    def test_what_nobody_notes_is_seen_at_the_next_full_look(self):
        side = self.parked()
        side.manager.request_status[9] = KVPoll.Failed  # as when a time limit is over
        side.poll()
        self.assertIn("r009", rids(side.prealloc.queue))
        self.now += parked_requests.FULL_LOOK_SECONDS
        side.poll()
        self.assertNotIn("r009", rids(side.prealloc.queue))

    def test_a_step_that_fails_loses_nobody(self):
        side = self.parked()
        side.manager.set(3, KVPoll.WaitingForInput)
        with (
            mock.patch.object(side.prealloc, "_pre_alloc", side_effect=MemoryError),
            self.assertRaises(MemoryError),
        ):
            side.prealloc.pop_preallocated()
        self.assertEqual(len(side.prealloc.queue), MANY)

    def test_few_are_all_asked(self):
        side = self.server()
        for room in range(1, 4):
            arrive(side, room)
        for _ in range(2):
            side.poll()
            self.assertEqual(side.manager.rooms_asked(), [1, 2, 3])

    def test_a_backend_without_such_a_table_is_asked_every_time(self):
        side = self.server()
        for room in range(1, MANY + 1):
            arrive(side, room)
            poll = mock.MagicMock(return_value=KVPoll.Bootstrapping)
            side.prealloc.queue[-1].kv_receiver.poll = poll
        with mock.patch.object(parked_requests, "TABLE_POLLS", ()):
            side.poll()
            side.poll()
        self.assertEqual(poll.call_count, 2)


class TestTransfers(Decode):
    def setUp(self):
        super().setUp()
        self.side = side = self.server(size=MANY, pre_alloc=MANY)
        for room in range(1, MANY + 1):
            arrive(side, room, KVPoll.WaitingForInput)
        side.poll()
        self.assertEqual(len(side.transfer.queue), MANY)
        side.poll()
        side.manager.rooms_asked()

    def test_a_pass_without_news_asks_nobody(self):
        self.side.poll()
        self.assertEqual(self.side.manager.rooms_asked(), [])

    def test_a_finished_one_is_committed(self):
        self.side.arrived("r040")
        self.side.poll()
        self.assertEqual(self.side.manager.rooms_asked(), [40])
        self.assertEqual(self.side.waiting(), ["r040"])
        self.assertEqual(len(self.side.transfer.queue), MANY - 1)

    def test_one_whose_row_is_late_is_committed_when_the_row_is_there(self):
        self.side.kv_arrived("r040")
        self.side.poll()
        self.assertEqual(self.side.waiting(), [])
        entry = self.side.entry("r040")
        self.side.write(entry.metadata_buffer_index, 40, 1)
        self.side.poll()
        self.assertEqual(self.side.waiting(), ["r040"])


class TestRanks(Decode):
    def test_nobody_is_shown_before_all_ranks_are_ready(self):
        """What this rank alone was told changes nothing; what both know does, on both."""
        other = {}

        def vote(votes, op, group):
            for place, entry in enumerate(watch.entries):
                votes[place] = min(int(votes[place]), other.get(entry.bootstrap_room, 1))

        asked = []
        queue = [
            SimpleNamespace(
                bootstrap_room=room, poll=lambda room=room: asked.append(room) or mine[room]
            )
            for room in range(1, 5)
        ]
        mine = dict.fromkeys(range(1, 5), KVPoll.Bootstrapping)
        watch = parked_requests.Watch(lambda entry: entry, parked_requests.HANDSHAKE, ["both"])
        with mock.patch.object(parked_requests.torch.distributed, "all_reduce", vote):
            watch.look(queue)
            mine[2] = KVPoll.WaitingForInput
            watch.journal.append(2)
            self.assertEqual(list(watch.look(queue)), [])
            other[2] = int(KVPoll.WaitingForInput)
            self.assertEqual(list(watch.look(queue)), [(queue[1], int(KVPoll.WaitingForInput))])
        self.assertEqual(asked, [1, 2, 3, 4, 2])

    def test_a_status_that_is_told_again_is_no_news(self):
        entry = SimpleNamespace(bootstrap_room=1, poll=lambda: KVPoll.WaitingForInput)
        watch = parked_requests.Watch(lambda entry: entry, parked_requests.HANDSHAKE, [])
        first = list(watch.look([entry]))
        watch.journal.append(1)
        with mock.patch.object(parked_requests, "_smallest") as vote:
            self.assertEqual(list(watch.look([entry])), first)
        vote.assert_not_called()


class TestSameDecisions(Decode):
    """Whatever happens, a watched server and one that asks everybody decide alike."""

    STEPS = 400

    def happen(self, rng, sides):
        """The same random event on both sides; both have the same queues."""
        kind = rng.choice(("arrive", "ready", "ready", "done", "done", "row", "abort", "turn"))
        side = sides[0]
        if kind == "arrive" and len(side.prealloc.queue) < 40:
            self.room += 1
            for each in sides:
                arrive(each, self.room)
            return
        if kind == "turn":
            for each in sides:
                each.turn()
            return
        pool = side.prealloc.queue if kind == "ready" else side.transfer.queue
        if not pool:
            return
        rid = rng.choice(rids(pool))
        for each in sides:
            entry = each.entry(rid)
            if kind == "ready":
                each.manager.set(entry.req.bootstrap_room, KVPoll.WaitingForInput)
            elif kind == "done":
                each.arrived(rid)
            elif kind == "row":
                each.kv_arrived(rid)
            else:
                each.abort(rid)

    def state(self, side):
        return (
            rids(side.prealloc.queue),
            rids(side.transfer.queue),
            side.waiting(),
            side.running(),
            side.slots.counts(),
        )

    def test_random_events(self):
        for seed in range(4):
            rng, self.room = random.Random(seed), 0
            with mock.patch.object(parked_requests, "FEW", 1):
                sides = [self.server(size=8, pre_alloc=8), self.server(size=8, pre_alloc=8)]
                for step in range(self.STEPS):
                    self.happen(rng, sides)
                    sides[0].poll()
                    with mock.patch.object(parked_requests, "FEW", 10**9):
                        sides[1].poll()
                    self.assertEqual(*map(self.state, sides), f"seed {seed} step {step}")
                self.assertGreater(self.room, 20)


@unittest.skipUnless(parked_requests, "needs its module")
class TestPrefill(unittest.TestCase):
    def setUp(self):
        published = contextlib.ExitStack()
        self.addCleanup(published.close)
        decode_side.publish_server_args(published)
        self.table = Table()
        group = decode_side.one_rank_group()
        self.rows = mock.MagicMock(available_size=lambda: self.free)
        self.free = 2
        self.queue = queue = prefill.PrefillBootstrapQueue.__new__(prefill.PrefillBootstrapQueue)
        given = SimpleNamespace(optimistic_prefill_attempts=0, optimistic_prefill_retries=0)
        scheduler = mock.MagicMock(
            attn_tp_cpu_group=group, attn_cp_cpu_group=group, server_args=given
        )
        vars(queue).update(
            pp_size=1,
            scheduler_stage_metrics=mock.MagicMock(enabled=False),
            scheduler=scheduler,
            kv_manager=SimpleNamespace(),
            queue=[],
            req_to_metadata_buffer_idx_allocator=self.rows,
        )
        for room in range(1, MANY + 1):
            queue.queue.append(self.request(room))

    def request(self, room):
        table = self.table

        class Sender:
            kv_mgr = table
            bootstrap_room = room

            def poll(self):
                return table.poll(room)

            def failure_exception(self):
                raise RuntimeError("failed")

        Sender.poll.__module__ = parked_requests.TABLE_POLLS[1]
        table.set(room, KVPoll.Bootstrapping)
        return mock.MagicMock(
            rid=name(room),
            bootstrap_room=room,
            disagg_kv_sender=Sender(),
            metadata_buffer_index=-1,
            is_retracted=False,
            prefill_attempt_count=0,
        )

    def shown(self):
        """What SGLang's own step is given."""
        seen = []
        with mock.patch.object(prefill, "poll_and_all_reduce_attn_cp_tp_group") as poll:
            poll.side_effect = lambda senders, *_: [
                seen.append(s.bootstrap_room) or KVPoll.Bootstrapping for s in senders
            ]
            self.queue.can_prefill_before_bootstrap = lambda _: False
            self.queue.pop_bootstrapped()
        return seen

    def test_a_pass_without_news_asks_nobody(self):
        self.shown()
        self.table.rooms_asked()
        self.assertEqual(self.shown(), [])
        self.assertEqual(self.table.rooms_asked(), [])
        self.assertEqual(len(self.queue.queue), MANY)

    def test_as_many_ready_ones_as_there_are_rows_and_those_that_have_one(self):
        self.shown()
        for room in (10, 20, 30, 40, 50):
            self.table.set(room, KVPoll.WaitingForInput)
        self.queue.queue[49].metadata_buffer_index = 3
        self.assertEqual(self.shown(), [10, 20, 30, 50])

    def test_failed_ones_are_all_shown(self):
        self.shown()
        self.free = 0
        for room in (10, 20, 30):
            self.table.set(room, KVPoll.Failed)
        self.assertEqual(self.shown(), [10, 20, 30])

    def test_a_prefill_that_starts_early_looks_at_everybody(self):
        self.queue.scheduler.server_args.optimistic_prefill_attempts = 1
        self.assertEqual(len(self.shown()), MANY)


if __name__ == "__main__":
    unittest.main()
