# SPDX-License-Identifier: Apache-2.0
"""What is known of a room is gone once its request is over, late messages of it included."""

import gc
import inspect
import threading
import unittest
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import zmq
from sglang.srt.disaggregation import decode, prefill, room_tables
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.fake.conn import FakeKVReceiver
from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.managers.scheduler import Scheduler
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

ROOM, ADDRESS = 7, "127.0.0.1:8998"
BOOTSTRAP_S = 100.0


class Manager(conn.MooncakeKVManager):
    """A real manager's tables and message threads, without engine and sockets."""

    def __init__(self, end):
        self.request_status, self.failure_records = {}, {}
        self.failure_lock, self.session_lock = threading.Lock(), threading.Lock()
        self.connection_lock = threading.Lock()
        self.enable_staging = self.enable_trace = self._stopped = False
        self.enable_deferred_decode_kv_release = self.defer_decode_allocation = False
        self.deferred_bootstrap = self._staging_ctx = None
        self._deferred_ack_targets, self._staging_outstanding = {}, defaultdict(int)
        self._deferred_ack_poisoned_rooms, self._deferred_abort_ack_tracker = set(), {}
        self._worker_threads, self.attn_tp_rank, self.decode_kv_args_table = [], 0, {}
        self.server_args = SimpleNamespace(enable_pd_role_switch=False)
        self.disaggregation_mode = conn.DisaggregationMode(end)
        if end == "prefill":
            self.transfer_infos, self.req_to_decode_prefix_len = {}, {}
            self.bootstrap_timeout = BOOTSTRAP_S
        else:
            self.required_prefill_response_num_table = {}
            self.prefill_response_tracker = defaultdict(set)
            self.addr_to_rooms_tracker = defaultdict(set)

    def resolve_kv_replica_factor(self, _):
        pass

    def _send_multipart_locked(self, *_, **__):
        pass

    def _start_heartbeat_checker_thread(self):
        return None

    def read(self, *messages):
        """Have the thread that reads messages take these in, until its socket closes."""
        waiting, started = [*messages], []

        def receive(*_, **__):
            if not waiting:
                raise zmq.ZMQError(zmq.ENOTSOCK)
            return waiting.pop(0)

        self.server_socket = SimpleNamespace(recv_multipart=receive)
        thread = mock.patch.object(
            conn.threading,
            "Thread",
            lambda target=None, **_: started.append(target) or mock.MagicMock(),
        )
        with thread:
            at_prefill = hasattr(self, "transfer_infos")
            self.start_prefill_thread() if at_prefill else self.start_decode_thread()
        with self_closing():
            started[0]()


class self_closing:
    """The end of a thread whose socket is closed."""

    def __enter__(self):
        return self

    def __exit__(self, _kind, error, _where):
        return isinstance(error, zmq.ZMQError) and error.errno == zmq.ENOTSOCK


def metadata(room):
    """What decode sends when it has pages for a request; frames of all releases."""
    pages, states, prefix = b"\x00" * 4, b"", b"0"
    head = [str(room).encode(), b"127.0.0.1", b"1", b"session:1", pages, b"0", states, b"1"]
    return [*head, prefix, b"", b""]


def failed(room):
    """What prefill says of a transfer that failed."""
    return [str(room).encode(), str(int(KVPoll.Failed)).encode(), b"0"]


class Sender(conn.MooncakeKVSender):
    """A real sender, made as far as clearing it looks at it."""

    def __init__(self, mgr=None, bootstrap_room=ROOM, **_):
        self.kv_mgr, self.bootstrap_room, self.conclude_state = mgr, bootstrap_room, None
        self.trace_ctx = mock.MagicMock()
        mgr.update_status(self.bootstrap_room, KVPoll.Bootstrapping)


class Receiver(conn.MooncakeKVReceiver):
    """A real receiver, made as far as clearing it looks at it."""

    def __init__(self, mgr=None, bootstrap_addr=ADDRESS, bootstrap_room=ROOM, **_):
        self.kv_mgr, self.bootstrap_room, self.conclude_state = mgr, bootstrap_room, None
        self.bootstrap_addr, self.abort_notified, self.bootstrap_infos = bootstrap_addr, True, None
        self.trace_ctx = mock.MagicMock()
        mgr.addr_to_rooms_tracker[bootstrap_addr].add(bootstrap_room)
        mgr.prefill_response_tracker[bootstrap_room] = set()
        mgr.required_prefill_response_num_table[bootstrap_room] = 1
        mgr.update_status(self.bootstrap_room, KVPoll.Bootstrapping)


class Request(mock.MagicMock):
    """A request that asks for a sender or receiver."""

    def __init__(self, **_):
        super().__init__()
        self.bootstrap_room, self.bootstrap_host, self.bootstrap_port = ROOM, "127.0.0.1", 8998
        self.origin_input_ids, self.disagg_kv_sender = [1, 2], None

    def _get_child_mock(self, **given):
        return mock.MagicMock(**given)


class Clocked(unittest.TestCase):
    end = "prefill"

    def setUp(self):
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        patch = mock.patch.object(room_tables, "time", clock)
        patch.start()
        self.addCleanup(patch.stop)
        self.manager = Manager(self.end)

    def pass_for(self, seconds):
        """The loop turns for as long, once a second."""
        for _ in range(int(seconds)):
            self.now += 1
            self.turn()

    def assert_gone(self):
        self.assertEqual(room_tables.known(self.manager), set())
        for name in room_tables.TABLES:
            self.assertFalse(getattr(self.manager, name, None), name)


class TestPrefill(Clocked):
    def setUp(self):
        super().setUp()
        queue = prefill.PrefillBootstrapQueue.__new__(prefill.PrefillBootstrapQueue)
        queue.kv_manager, queue.queue, queue.pp_size = self.manager, [], 1
        queue.scheduler, queue.transfer_backend = mock.MagicMock(), "mooncake"
        queue.scheduler_stage_metrics, queue.tp_rank, queue.pp_rank = None, 0, 0
        queue.bootstrap_port, queue.max_total_num_tokens = 8998, 100
        queue._check_if_req_exceed_kv_capacity = lambda _: False
        self.queue = queue

    def turn(self):
        self.queue.pop_bootstrapped()

    def sender(self):
        """The sender of a request that arrives now."""
        make = getattr(self.queue, "create_sender", self.queue.add)
        request = Request()
        with mock.patch.object(prefill, "get_kv_class", lambda *_: Sender):
            make(request, 1)
        self.queue.queue.clear()  # its poll is another test's
        return request.disagg_kv_sender

    def test_metadata_that_comes_after_the_end_is_forgotten(self):
        sender = self.sender()
        self.manager.read(metadata(ROOM))
        sender.conclude_state = KVPoll.Failed
        sender.clear()
        self.manager.read(metadata(ROOM))
        self.assertIn(ROOM, self.manager.transfer_infos)
        self.pass_for(BOOTSTRAP_S + 4)
        self.assert_gone()

    def test_an_abort_of_it_is_forgotten_soon(self):
        self.manager.read(metadata(ROOM))
        self.manager.update_status(ROOM, KVPoll.Failed)
        self.pass_for(room_tables.OVER_S + 4)
        self.assert_gone()

    def test_metadata_that_comes_early_waits_for_its_request(self):
        self.manager.read(metadata(ROOM))
        self.pass_for(BOOTSTRAP_S - 4)
        sender = self.sender()
        self.assertEqual(self.manager.request_status[ROOM], KVPoll.WaitingForInput)
        self.pass_for(3 * BOOTSTRAP_S)
        self.assertIn(ROOM, self.manager.transfer_infos)
        self.assertIsNotNone(sender)

    def test_a_request_under_way_keeps_all_that_is_known_of_it(self):
        sender = self.sender()
        self.manager.read(metadata(ROOM))
        before = {
            name: dict(getattr(self.manager, name))
            for name in ("request_status", "transfer_infos", "req_to_decode_prefix_len")
        }
        self.pass_for(3 * BOOTSTRAP_S)
        for name, table in before.items():
            self.assertEqual(getattr(self.manager, name), table)
        self.assertEqual(room_tables.RoomTables.of(self.manager).owned(), {ROOM})
        sender.clear()

    def test_a_request_that_is_dropped_without_a_word_is_forgotten(self):
        sender = self.sender()
        del sender
        gc.collect()
        self.pass_for(room_tables.OVER_S + 4)
        self.assert_gone()

    def test_a_failure_that_nobody_asked_for_is_forgotten(self):
        self.manager.record_failure(ROOM, "told twice")
        self.pass_for(room_tables.OVER_S + 4)
        self.assert_gone()

    def test_what_is_over_leaves_nothing_behind_in_the_sweep_itself(self):
        for room in range(1, 50):
            self.manager.read(metadata(room))
            self.pass_for(4)
        self.pass_for(BOOTSTRAP_S + 4)
        self.assertEqual(room_tables.RoomTables.of(self.manager).since, {})
        self.assert_gone()


class TestDecode(Clocked):
    end = "decode"

    class Looked(Exception):
        """The sweep is over; what the queue does afterwards is another test's."""

    def setUp(self):
        super().setUp()
        queue = decode.DecodePreallocQueue.__new__(decode.DecodePreallocQueue)
        queue.kv_manager, queue.queue, queue.pp_size = self.manager, [], 1
        queue.transfer_backend, queue.max_total_num_tokens = "mooncake", 100
        in_order = SimpleNamespace(pp_size=1, enable_priority_scheduling=False)
        queue.scheduler = mock.MagicMock(server_args=in_order, enable_lora=False)
        queue.tp_rank, queue.pending_reqs = 0, []

        def looked(*_, **__):
            raise self.Looked

        queue._resolve_pending_reqs = queue._update_handshake_waiters = looked
        queue._check_if_req_exceed_kv_capacity = lambda _: False
        self.queue = queue

    def turn(self):
        with self.assertRaises(self.Looked):
            self.queue.pop_preallocated()

    def receiver(self, kind=Receiver):
        """The receiver of a request that arrives now."""
        make = getattr(self.queue, "_create_receiver_and_enqueue", self.queue.add)
        with mock.patch.object(decode, "get_kv_class", lambda *_: kind):
            make(Request())
        return self.queue.queue.pop().kv_receiver

    def test_a_probe_that_waits_owns_nothing(self):
        """Its receiver is a stand-in without a room."""
        probe = self.receiver(FakeKVReceiver)
        self.pass_for(room_tables.OVER_S)
        self.assertEqual(room_tables.RoomTables.of(self.manager).owned(), set())
        self.assertFalse(hasattr(probe, "bootstrap_room"))

    def test_a_failure_told_after_the_end_is_forgotten(self):
        receiver = self.receiver()
        receiver.conclude_state = KVPoll.Failed
        receiver.clear()
        self.manager.read(failed(ROOM))
        self.pass_for(room_tables.OVER_S + 4)
        self.assert_gone()
        self.assertNotIn(ROOM, self.manager.addr_to_rooms_tracker.get(ADDRESS, ()))

    def test_addresses_that_no_request_names_are_forgotten(self):
        for port in range(50):
            receiver = self.receiver()
            address = f"127.0.0.1:{port}"
            self.manager.addr_to_rooms_tracker[address].add(ROOM)
            receiver.conclude_state = KVPoll.Failed
            receiver.clear()
        self.pass_for(room_tables.OVER_S + 4)
        self.assertEqual(dict(self.manager.addr_to_rooms_tracker), {})

    def test_a_request_under_way_keeps_all_that_is_known_of_it(self):
        receiver = self.receiver()
        self.pass_for(3 * BOOTSTRAP_S)
        self.assertIn(ROOM, self.manager.request_status)
        self.assertIn(ROOM, self.manager.prefill_response_tracker)
        self.assertIn(ROOM, self.manager.required_prefill_response_num_table)
        self.assertEqual(self.manager.addr_to_rooms_tracker, {ADDRESS: {ROOM}})
        self.assertIsNone(receiver.conclude_state)


class TestCounts(unittest.TestCase):
    def test_the_internal_state_says_how_many_rooms_are_known(self):
        manager = Manager("prefill")
        manager.request_status[ROOM] = KVPoll.Bootstrapping
        manager.failure_records[ROOM + 1] = "late"
        sender = Sender(manager)
        room_tables.own(manager, sender)
        scheduler = SimpleNamespace(
            disagg_prefill_bootstrap_queue=SimpleNamespace(kv_manager=manager)
        )
        reply = SimpleNamespace(internal_state={})
        self.assertIs(room_tables.counted(scheduler, reply), reply)
        self.assertEqual(reply.internal_state["rooms"], {"known": 2, "owned": 1})

    def test_an_aggregated_server_says_nothing_of_rooms(self):
        reply = SimpleNamespace(internal_state={})
        room_tables.counted(SimpleNamespace(), reply)
        self.assertEqual(reply.internal_state, {})

    def test_the_scheduler_s_own_answer_is_the_one_that_counts(self):
        step = inspect.unwrap(Scheduler.get_internal_state)
        self.assertIn("room_tables", step.__code__.co_names)


if __name__ == "__main__":
    unittest.main()
