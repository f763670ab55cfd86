# SPDX-License-Identifier: Apache-2.0
"""Decode's loop asks no bootstrap server itself, and a bad one costs its own requests alone."""

import contextlib
import json
import socket
import threading
import time
import unittest
from types import SimpleNamespace
from unittest import mock

from sglang.srt.disaggregation import decode, prefill_lookup
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

LAYOUT = {
    "attn_tp_size": 1,
    "attn_cp_size": 1,
    "dp_size": 1,
    "pp_size": 1,
    "page_size": 1,
    "kv_cache_dtype": "auto",
    "follow_bootstrap_room": True,
}
ROUTE = {"rank_ip": "127.0.0.1", "rank_port": 4567}
MOST_PASSES = 400


class Server:
    """A bootstrap server on loopback; `answer` turns the target of a request into bytes or JSON."""

    def __init__(self, answer):
        self.answer, self.targets = answer, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.closed = threading.Event()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while not self.closed.is_set():
            with contextlib.suppress(OSError):
                connection, _ = self.listener.accept()
                threading.Thread(target=self.talk, args=(connection,), daemon=True).start()

    def talk(self, connection):
        with connection, contextlib.suppress(OSError):
            target = connection.recv(65536).split(b" ")[1].decode()
            self.targets.append(target)
            said = self.answer(target)
            if said is None:
                self.closed.wait()
            elif isinstance(said, bytes):
                connection.sendall(said)
            else:
                body = json.dumps(said).encode()
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                connection.sendall(head + body)

    def close(self):
        self.closed.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


def honest(target, **layout):
    """What a prefill of one rank answers."""
    if "query_dp_ranks" in target:
        return {}
    return {**LAYOUT, **layout} if "prefill_dp_rank=-1" in target else ROUTE


class Manager(CommonKVManager):
    """A real manager of one decode rank, without buffers, sockets and threads of its own."""

    def __init__(self):
        self.prefill_info_table, self.connection_pool = {}, {}
        self.connection_lock, self._prefill_recompute_executor = threading.Lock(), None
        self._prefill_recompute_executor_lock = threading.RLock()
        self.kv_args = SimpleNamespace(page_size=1, state_types=[], engine_rank=0)
        self.server_args = SimpleNamespace(kv_cache_dtype="auto")
        self.kv_cache_dtype_str, self.kv_layout, self.dsv41_spec_layout = "auto", None, None
        self.attn_tp_size = self.attn_cp_size = self.dcp_size = self.pp_size = 1
        self.is_mla_backend = self.is_hybrid_mla_backend = False
        self.reasons = {}

    def _resolve_rank_mapping(self, info):
        info.target_tp_rank, info.target_tp_ranks = 0, list(range(info.attn_tp_size))
        info.target_cp_ranks = list(range(info.attn_cp_size))
        info.target_pp_ranks = list(range(info.pp_size))

    def record_failure(self, room, reason):
        self.reasons[room] = reason

    def connect(self, address, rank=0):
        self.connection_pool[f"{address}_{rank}_0_0"] = [ROUTE]


class Receiver:
    """A receiver that is told where to go, and goes nowhere."""

    def __init__(self):
        self.rank = self.aborted = None

    def init(self, rank):
        self.rank = rank

    def abort(self):
        self.aborted = True


class Asking(CommonKVReceiver):
    """A real receiver as far as it asks for routes."""

    def __init__(self, manager, address):
        self.kv_mgr, self.bootstrap_addr = manager, address


Asking.__abstractmethods__ = frozenset()  # which of them there are depends on the release


class Queue(decode.DecodePreallocQueue):
    """The real queue with requests that wait for their prefill."""

    def __init__(self, manager):
        self.kv_manager = manager
        self.pending_reqs, self.queue = [], []
        self._ensure_retry_count, self._ensure_last_attempt_time = {}, {}
        self._max_ensure_retries, self._ensure_retry_interval = 3, 0.0
        self._prefill_dp_rank_queries = {}

    def _init_receiver(self, decode_req, prefill_dp_rank):
        decode_req.kv_receiver.init(prefill_dp_rank)

    def wait_for(self, address, room=7, rank=None):
        host, _, port = address.rpartition(":")
        req = SimpleNamespace(
            bootstrap_host=host,
            bootstrap_port=int(port),
            bootstrap_room=room,
            disagg_prefill_dp_rank=rank,
        )
        entry = SimpleNamespace(req=req, kv_receiver=Receiver())
        self.pending_reqs.append(entry)
        return entry


class LookupTest(unittest.TestCase):
    def setUp(self):
        self.manager = Manager()
        self.queue = Queue(self.manager)
        self.addCleanup(self.end_executor)
        self.threads = set()
        connect = socket.socket.connect

        def noted(sock, where):
            asking = threading.get_ident()
            self.threads.add(asking)
            if asking == threading.main_thread().ident:
                raise ConnectionRefusedError("the loop asks nobody itself")
            return connect(sock, where)

        self.enterContext(mock.patch.object(socket.socket, "connect", noted))
        self.enterContext(mock.patch.object(prefill_lookup, "ANSWER_S", 0.5))

    def end_executor(self):
        if self.manager._prefill_recompute_executor is not None:
            self.manager._prefill_recompute_executor.shutdown(wait=True)

    def serve(self, answer=honest):
        server = Server(answer)
        self.addCleanup(server.close)
        return server

    def passes_until(self, done):
        """Passes of the loop until `done()`; a bound on their number, not on time."""
        for _ in range(MOST_PASSES):
            self.queue._resolve_pending_reqs()
            if done():
                return
            time.sleep(0.01)
        self.fail("it did not come to that")

    def assert_loop_asked_nobody(self):
        self.assertNotIn(threading.get_ident(), self.threads)


class TestTheLoop(LookupTest):
    def test_it_never_connects_and_the_good_prefill_is_reached(self):
        good, silent = self.serve(), self.serve(lambda _: None)
        lost = self.queue.wait_for(silent.address, 1)
        kept = self.queue.wait_for(good.address, 2)
        self.passes_until(lambda: kept.kv_receiver.rank is not None)
        self.assertEqual(kept.kv_receiver.rank, 0)
        self.assertIsNone(lost.kv_receiver.rank)
        self.assert_loop_asked_nobody()

    def test_routes_are_there_when_the_receiver_asks_for_them(self):
        good = self.serve()
        entry = self.queue.wait_for(good.address)
        self.passes_until(lambda: entry.kv_receiver.rank is not None)
        receiver = Asking(self.manager, good.address)
        asked = len(good.targets)
        route = receiver._get_bootstrap_info_from_server(0, 0, 0, 0)
        self.assertEqual((route["rank_ip"], route["rank_port"]), ("127.0.0.1", 4567))
        self.assertEqual(len(good.targets), asked)
        self.assertIsNone(receiver._get_bootstrap_info_from_server(9, 0, 0, 0))
        self.assert_loop_asked_nobody()

    def test_a_known_prefill_is_not_asked_again(self):
        good = self.serve()
        first = self.queue.wait_for(good.address)
        self.passes_until(lambda: first.kv_receiver.rank is not None)
        self.manager.connect(good.address)
        asked = len(good.targets)
        second = self.queue.wait_for(good.address, 8)
        self.queue._resolve_pending_reqs()
        self.assertEqual(second.kv_receiver.rank, 0)
        self.assertEqual(len(good.targets), asked)

    def test_a_new_request_takes_the_short_way_only_when_routes_are_known(self):
        good = self.serve()
        entry = self.queue.wait_for(good.address)
        self.passes_until(lambda: entry.kv_receiver.rank is not None)
        self.assertIsNone(prefill_lookup.connected_rank(self.queue, entry.req))
        self.manager.connect(good.address)
        self.assertEqual(prefill_lookup.connected_rank(self.queue, entry.req), 0)

    def test_a_restarted_prefill_is_asked_for_its_new_routes(self):
        good = self.serve()
        for room in (1, 2):  # between them the connections are dropped
            entry = self.queue.wait_for(good.address, room)
            self.passes_until(lambda entry=entry: entry.kv_receiver.rank is not None)
        routes = [target for target in good.targets if "prefill_dp_rank=0" in target]
        self.assertEqual(len(routes), 2)

    def test_the_rank_of_a_room_is_asked_beside_the_loop(self):
        def answer(target):
            said = honest(target, dp_size=4, follow_bootstrap_room=False)
            return {"7": 3} if "query_dp_ranks" in target else said

        prefill = self.serve(answer)
        entry = self.queue.wait_for(prefill.address, 7)
        self.passes_until(lambda: entry.kv_receiver.rank is not None)
        self.assertEqual(entry.kv_receiver.rank, 3)
        self.assert_loop_asked_nobody()


class TestBadServers(LookupTest):
    def fails(self, address, *words):
        """Requests to `address` fail, naming it; one to a good prefill that waits does not."""
        bad = self.queue.wait_for(address, 1)
        good = self.queue.wait_for(self.serve().address, 2)
        self.passes_until(lambda: bad.kv_receiver.aborted and good.kv_receiver.rank is not None)
        for word in (address, *words):
            self.assertIn(word, self.manager.reasons[1])
        self.assertNotIn(2, self.manager.reasons)
        self.assertIsNone(good.kv_receiver.aborted)
        self.assert_loop_asked_nobody()
        self.queue._resolve_pending_reqs()
        self.assertEqual(self.queue._ensure_retry_count, {})

    def test_one_that_refuses_connections(self):
        server = self.serve()
        server.close()
        self.fails(server.address)

    def test_one_that_is_silent(self):
        self.fails(self.serve(lambda _: None).address)

    def test_one_that_speaks_something_else(self):
        for said in (b"", b"\x00" * 100, b"HTTP/1.1 200 OK\r\n\r\nnot json", b"SSH-2.0-x\r\n"):
            with self.subTest(said=said):
                self.setUp()
                self.fails(self.serve(lambda _, said=said: said).address)

    def test_one_whose_layout_is_no_layout(self):
        for said in ([], {}, {**LAYOUT, "surprise": 1}, {**LAYOUT, "attn_tp_size": "many"}):
            with self.subTest(said=said):
                self.setUp()
                self.fails(self.serve(lambda _, said=said: said).address)

    def test_one_whose_sizes_are_beyond_reason(self):
        for name, size in (("dp_size", 0), ("attn_tp_size", 0), ("pp_size", 10**9)):
            with self.subTest(name=name):
                self.setUp()
                self.fails(self.serve(lambda t, n=name, s=size: honest(t, **{n: s})).address)

    def test_one_that_does_not_match_fails_at_once_and_says_what_differs(self):
        prefill = self.serve(lambda target: honest(target, kv_cache_dtype="fp8_e5m2"))
        if hasattr(conn, "pair_layout"):  # leaves it to the receiver, which tells prefill as well
            entry = self.queue.wait_for(prefill.address)
            self.passes_until(lambda: entry.kv_receiver.rank is not None)
            reason = self.manager.prefill_info_table[prefill.address].refusal
            self.assertRegex(reason, "fp8_e5m2.+auto")
        else:
            self.fails(prefill.address, "fp8_e5m2", "auto")
        layouts = [target for target in prefill.targets if "prefill_dp_rank=-1" in target]
        self.assertEqual(len(layouts), 1)

    def test_one_whose_routes_lead_nowhere_is_left_to_its_receiver(self):
        for said in (None, [], {}, {"rank_ip": 5, "rank_port": 1}, {**ROUTE, "rank_port": -1}):
            with self.subTest(said=said):
                self.setUp()
                prefill = self.serve(
                    lambda t, said=said: (
                        said if "/route?" in t and "prefill_dp_rank=-1" not in t else honest(t)
                    )
                )
                entry = self.queue.wait_for(prefill.address)
                self.passes_until(lambda entry=entry: entry.kv_receiver.rank is not None)
                receiver = Asking(self.manager, prefill.address)
                self.assertIsNone(receiver._get_bootstrap_info_from_server(0, 0, 0, 0))
                self.assert_loop_asked_nobody()

    def test_one_that_lies_about_ranks_is_not_believed(self):
        for said in ([], {"7": -1}, {"7": 4}, {"7": "x"}, {"7": None}):
            with self.subTest(said=said):
                self.setUp()
                prefill = self.serve(
                    lambda t, said=said: (
                        said
                        if "query_dp_ranks" in t
                        else honest(t, dp_size=4, follow_bootstrap_room=False)
                    )
                )
                entry = self.queue.wait_for(prefill.address)
                asked = [0]

                def several(prefill=prefill, asked=asked):
                    asked[0] = sum("query_dp_ranks" in target for target in prefill.targets)
                    return asked[0] >= 2

                self.passes_until(several)
                self.assertIsNone(entry.kv_receiver.rank)
                self.assertIsNone(entry.req.disagg_prefill_dp_rank)

    def test_many_of_them_do_not_take_all_threads(self):
        silent = [self.serve(lambda _: None) for _ in range(3 * prefill_lookup.AT_ONCE)]
        for room, server in enumerate(silent):
            self.queue.wait_for(server.address, room)
        self.queue._resolve_pending_reqs()
        asked = prefill_lookup.Lookups.of(self.manager).asked
        self.assertEqual(len(asked), prefill_lookup.AT_ONCE)

    def test_nothing_is_kept_of_addresses_that_nobody_waits_for(self):
        for _ in range(5):
            self.queue.wait_for(self.serve(lambda _: None).address)
        self.queue._resolve_pending_reqs()
        self.queue.pending_reqs = [self.queue.wait_for(self.serve().address)]
        lookups = prefill_lookup.Lookups.of(self.manager)
        self.passes_until(lambda: not self.queue.pending_reqs and len(lookups.asked) <= 5)
        for _ in range(MOST_PASSES):
            self.queue._ensure_prefill_info({})
            if not lookups.asked:
                break
            time.sleep(0.01)
        self.assertEqual((lookups.asked, lookups.routes), ({}, {}))


class TestExchange(LookupTest):
    def beside(self, ask, *args, **kwargs):
        executor = self.manager._ensure_prefill_recompute_executor()
        return executor.submit(ask, *args, **kwargs).result()

    def test_a_server_that_sends_a_byte_at_a_time_has_one_limit_for_all(self):
        server = self.serve()

        def talk(connection):
            with connection, contextlib.suppress(OSError):
                while not server.closed.wait(0.05):
                    connection.sendall(b"x")

        server.talk = talk
        with self.assertRaises(TimeoutError):
            self.beside(prefill_lookup.get, f"http://{server.address}/route", timeout=0.3)

    def test_an_endless_answer_is_cut(self):
        server = self.serve(lambda _: b"x" * (prefill_lookup.MAX_ANSWER + 2))
        with mock.patch.object(prefill_lookup, "ANSWER_S", 30.0), self.assertRaises(ValueError):
            self.beside(prefill_lookup.get, f"http://{server.address}/route", timeout=30.0)

    def test_an_error_keeps_its_status_and_text(self):
        server = self.serve(lambda _: b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nnot")
        answer = self.beside(prefill_lookup.get, f"http://{server.address}/route")
        self.assertEqual((answer.status_code, answer.text), (404, "not"))

    def test_what_is_posted_arrives_as_json(self):
        server = self.serve(lambda _: {"ok": 1})
        answer = self.beside(prefill_lookup.post, f"http://{server.address}/x", json={"a": [1]})
        self.assertEqual(answer.json(), {"ok": 1})


if __name__ == "__main__":
    unittest.main()
