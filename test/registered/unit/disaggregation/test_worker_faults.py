# SPDX-License-Identifier: Apache-2.0
"""Whatever a peer sends, the threads that serve everybody go on and the others' requests finish."""

import inspect
import socket
import threading
import unittest
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import zmq
from sglang.srt.disaggregation import decode, worker_faults
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake import conn
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")


class Ended(BaseException):
    """The test's queue has nothing more for the worker."""


class Chunk(SimpleNamespace):
    """A last chunk without pages: nothing is written, its metadata is due."""

    def __init__(self, room):
        super().__init__(
            room=room,
            prefill_kv_indices=[],
            index_slice=slice(0, 0),
            is_last=True,
            is_last_chunk=True,
            prefill_aux_index=0,
            state_indices=None,
            staging_counted=False,
            wait_event=None,
            indices_event=None,
            num_kv_tokens=0,
            trace_ctx=mock.MagicMock(),
        )


class Manager(conn.MooncakeKVManager):
    """A real manager without engine and sockets, and what it told decode."""

    def __init__(self):
        self.request_status, self.transfer_infos = {}, {}
        self.failure_records, self.failure_lock = {}, threading.Lock()
        self.decode_kv_args_table, self.session_lock = {}, threading.Lock()
        self.failed_sessions, self.session_failures = set(), defaultdict(int)
        self.state_layout_rejections, self.failed_session_probes = {}, {}
        self.req_to_decode_prefix_len, self.prefill_response_tracker = {}, defaultdict(set)
        self.required_prefill_response_num_table = {}
        self._staging_outstanding, self._deferred_ack_targets = defaultdict(int), {}
        self._deferred_ack_poisoned_rooms, self._staging_ctx = set(), None
        self.enable_staging = self.enable_trace = self._stopped = False
        self.enable_deferred_decode_kv_release = self.defer_decode_allocation = False
        self.deferred_bootstrap, self._dcp_pack_buffers = None, []
        self.attn_tp_rank = self.pp_rank = self.attn_cp_rank = self.attn_dp_rank = 0
        self.attn_tp_size = self.pp_size = self.attn_cp_size = self.dcp_size = 1
        self.is_mla_backend = self.is_hybrid_mla_backend = False
        self.bootstrap_port, self.kv_args = 8998, SimpleNamespace(kv_data_ptrs=[], state_types=[])
        self.server_args = SimpleNamespace(enable_pd_role_switch=False)
        self.pp_group = SimpleNamespace(rank_in_group=0, is_last_rank=True)
        self.disaggregation_mode = conn.DisaggregationMode.PREFILL
        self._worker_threads, self.told = [], []

    def begin(self, room, session):
        """A request in transfer to the decode server `session`."""
        self.request_status[room] = KVPoll.WaitingForInput
        self.transfer_infos[room] = {
            session: SimpleNamespace(
                room=room,
                is_dummy=False,
                endpoint="127.0.0.1",
                dst_port=1,
                mooncake_session_id=session,
                dst_kv_indices=[],
                dst_device_kv_indices=None,
                required_dst_info_num=1,
                decode_prefix_len=0,
            )
        }

    def send_aux(self, *_, **__):
        return 0

    def _get_dsa_cache_transfer_skip_flags(self, _):
        return False, False

    def sync_status_to_decode_endpoint(self, _remote, _port, room, status, *_):
        self.told.append((room, status))

    def send_kv_status_message(self, *, bootstrap_room, status, targets=(), **_):
        self.told += [(bootstrap_room, status) for _ in targets]

    def _start_heartbeat_checker_thread(self):
        return None


def run(manager, work, name, *messages):
    """Run the thread `name` that `work` starts, here, on these messages; then its socket closes."""
    waiting = [*messages]

    def receive(*_, **__):
        if not waiting:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        return waiting.pop(0)

    manager.server_socket = SimpleNamespace(recv_multipart=receive)
    targets = {}

    class Thread:
        def __init__(self, target=None, **_):
            targets[target.__name__] = target

        def start(self):
            pass

    with mock.patch.object(conn.threading, "Thread", Thread):
        work()
    try:
        targets[name]()
    except zmq.ZMQError as error:
        assert error.errno == zmq.ENOTSOCK
    return len(waiting)


class TestTransferWorker(unittest.TestCase):
    def work(self, manager, *rooms):
        chunks = [Chunk(room) for room in rooms]

        def take():
            if not chunks:
                raise Ended
            return chunks.pop(0)

        known = inspect.signature(conn.MooncakeKVManager.transfer_worker).parameters
        extra = {"staging_buffer": None, "worker_index": 0}
        given = {name: value for name, value in extra.items() if name in known}
        with self.assertRaises(Ended):
            manager.transfer_worker(SimpleNamespace(get=take, put=None), None, **given)

    def test_a_request_of_an_unknown_decode_server_fails_alone(self):
        manager = Manager()
        manager.begin(1, "never registered")
        manager.begin(2, "well")
        registered = SimpleNamespace(
            dst_attn_tp_size=1, requires_dcp_relayout=False, dst_kv_ptrs=[], dst_aux_ptrs=[]
        )
        registered.enable_hisparse, registered.dst_tp_rank = False, 0
        registered.dst_kv_layer_ids = registered.dst_kv_item_len = None
        manager.decode_kv_args_table["well"] = registered
        manager.send_kvcache = lambda *_, **__: 0
        self.work(manager, 1, 2)
        self.assertEqual(manager.request_status[1], KVPoll.Failed)
        self.assertIn("never registered", manager.failure_records[1])
        self.assertEqual(manager.request_status[2], KVPoll.Success)
        self.assertIn((1, KVPoll.Failed), manager.told)
        self.assertIn((2, KVPoll.Success), manager.told)
        self.assertNotIn(1, manager.transfer_infos)

    def test_a_request_that_is_over_is_not_begun_again(self):
        manager = Manager()
        manager.begin(1, "never registered")
        worker_faults.fail_transfer(manager, Chunk(7), IndexError("list index out of range"))
        self.assertNotIn(7, manager.request_status)
        self.assertNotIn(7, manager.failure_records)
        self.assertEqual(manager.told, [])

    def test_an_error_while_waiting_still_ends_the_worker(self):
        manager = Manager()

        def broken():
            raise OSError("no queue")

        with self.assertRaises((OSError, RuntimeError)):
            manager.transfer_worker(SimpleNamespace(get=broken), None)


class TestMessages(unittest.TestCase):
    BAD = (
        [b"\xff\xfe"],
        [b"None"],
        [b"12"],
        [b"twelve", b"h", b"1", b"session"],
        [b"None", b"h", b"1", b"session", b"\x01"],
        [b"12", b"h", b"1", b"session", b"\x00" * 3, b"x", b"", b"one"],
    )

    def test_prefill_reads_on_after_a_message_that_means_nothing(self):
        for bad in self.BAD:
            with self.subTest(bad=bad):
                manager = Manager()
                left = run(manager, manager.start_prefill_thread, "bootstrap_thread", bad, bad, bad)
                self.assertEqual(left, 0)
                self.assertFalse(
                    any(status == KVPoll.Success for status in manager.request_status.values())
                )

    def test_decode_reads_on_and_hears_of_the_transfer_after_it(self):
        for bad in ([b"1"], [b"x", b"y", b"z"], [b"1", b"4"], [b"\xff", b"4", b"0"]):
            with self.subTest(bad=bad):
                manager = Manager()
                manager.request_status[5] = KVPoll.WaitingForInput
                manager.prefill_response_tracker[5] = set()
                manager.required_prefill_response_num_table[5] = 1
                good = [b"5", str(int(KVPoll.Success)).encode(), b"0"]
                left = run(manager, manager.start_decode_thread, "decode_thread", bad, good)
                self.assertEqual(left, 0)
                self.assertEqual(manager.request_status[5], KVPoll.Success)


class TestHandshake(unittest.TestCase):
    def test_a_status_that_cannot_be_right_fails_its_request_alone(self):
        def entry(room):
            return SimpleNamespace(
                req=SimpleNamespace(
                    rid=f"r{room}",
                    bootstrap_room=room,
                    return_logprob=False,
                    finished_reason=None,
                    time_stats=mock.MagicMock(),
                ),
                kv_receiver=mock.MagicMock(),
                waiting_for_input=False,
            )

        queue = decode.DecodePreallocQueue.__new__(decode.DecodePreallocQueue)
        queue.queue, queue.gloo_group, queue.pp_size = [entry(1), entry(2)], None, 1
        polls = [KVPoll.Success, KVPoll.WaitingForInput]
        with mock.patch.object(decode, "poll_and_all_reduce", lambda *_, **__: polls):
            queue._update_handshake_waiters()
        bad, good = queue.queue
        self.assertIn("room 1", bad.req.finished_reason.message)
        bad.kv_receiver.abort.assert_called_once_with()
        self.assertTrue(good.waiting_for_input)
        self.assertIsNone(good.req.finished_reason)


class Sockets(conn.MooncakeKVManager):
    """A real manager as far as it sends to decode."""

    def __init__(self):
        self._zmq_ctx, self._socket_lock = zmq.Context(), threading.Lock()
        self._socket_cache, self._monitor_cache, self._socket_send_locks = {}, {}, {}
        self.defer_decode_allocation = False


class TestSockets(unittest.TestCase):
    NEWS_MS = 5000

    def setUp(self):
        if "_monitor_cache" not in inspect.getsource(conn.CommonKVManager._connect):
            self.skipTest("no socket is given up before 0.5.14")
        self.manager = Sockets()
        self.addCleanup(self.manager._zmq_ctx.destroy, linger=0)

    def test_what_a_peer_that_is_gone_has_not_taken_holds_up_nobody(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and nobody listens
            address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
            first = self.manager._connect(address)
            self.manager._monitor_cache[address].poll(self.NEWS_MS)
            self.assertIsNot(self.manager._connect(address), first)
            self.assertTrue(first.closed)

    def test_a_peer_that_listens_keeps_its_socket(self):
        peer = self.manager._zmq_ctx.socket(zmq.PULL)
        address = f"tcp://127.0.0.1:{peer.bind_to_random_port('tcp://127.0.0.1')}"
        first = self.manager._connect(address)
        for said in (b"one", b"two"):
            self.assertIs(self.manager._connect(address), first)
            first.send(said)
            self.assertEqual(peer.recv(), said)


if __name__ == "__main__":
    unittest.main()
