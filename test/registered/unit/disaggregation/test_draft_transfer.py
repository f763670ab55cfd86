# SPDX-License-Identifier: Apache-2.0
"""All draft pools travel, and two ends that draft differently say so instead of serving."""

import asyncio
import logging
import os
import threading
import unittest
from types import SimpleNamespace
from unittest import mock

import requests
import torch
from aiohttp import web
from sglang.srt.disaggregation import draft_transfer
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.draft_transfer import DraftLayout, JoinedPools
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

ROOM = 77


def mha_pool(layers=1, heads=2):
    return MHATokenToKVPool(
        size=16,
        page_size=4,
        dtype=torch.float32,
        head_num=heads,
        head_dim=4,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )


def runner(pool, heads=4, head_dim=4):
    model = SimpleNamespace(get_total_num_kv_heads=lambda: heads, head_dim=head_dim)
    return SimpleNamespace(token_to_kv_pool=pool, model_config=model)


def scheduler(*runners, topk=1, steps=3, multi_layer=False):
    spec = SimpleNamespace(
        speculative_eagle_topk=topk,
        speculative_num_steps=steps,
        enable_multi_layer_eagle=multi_layer,
    )
    return SimpleNamespace(
        draft_worker=SimpleNamespace(_draft_model_runners=lambda: runners),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: "target"),
        spec_algorithm=SimpleNamespace(name="EAGLE"),
        spec=spec,
    )


class Fresh(unittest.TestCase):
    """Settings come from the test's scheduler; every test starts as a server without a draft."""

    def setUp(self):
        os.environ.pop(draft_transfer.UNCHECKED, None)
        for patch in (
            mock.patch.object(draft_transfer, "_own", DraftLayout()),
            mock.patch.object(draft_transfer, "_spec_settings", lambda served: served.spec),
        ):
            patch.start()
            self.addCleanup(patch.stop)


class Registration(Fresh):
    """What the transfer queues register as the draft's buffers."""

    def test_one_pool_is_registered_as_it_is(self):
        pool = mha_pool()
        self.assertIs(pool, draft_transfer.all_pools(scheduler(runner(pool)), pool))

    def test_no_pool_stays_no_pool(self):
        self.assertIsNone(draft_transfer.all_pools(scheduler(), None))

    def test_every_pool_of_a_multi_layer_draft_is_registered(self):
        pools = [mha_pool(), mha_pool(), mha_pool()]
        served = scheduler(*map(runner, pools), multi_layer=True)
        joined = draft_transfer.all_pools(served, pools[0])
        pointers, lengths, items = joined.get_contiguous_buf_infos()
        keys = [pool.k_buffer[0].data_ptr() for pool in pools]
        values = [pool.v_buffer[0].data_ptr() for pool in pools]
        self.assertEqual(keys + values, pointers)
        self.assertEqual([pools[0].k_buffer[0].nbytes] * 6, lengths)
        self.assertEqual([4 * 2 * 4 * 4] * 6, items)  # page, heads, head_dim, float32

    def test_the_order_is_that_of_one_pool_with_all_layers(self):
        """All keys, then all values: SGLang derives layer ids and halves from that order."""
        pools = [mha_pool(layers=2), mha_pool(layers=1, heads=3)]
        joined = JoinedPools(pools)
        self.assertEqual(3, joined.layer_num)
        expected = [b.data_ptr() for pool in pools for b in pool.k_buffer]
        expected += [b.data_ptr() for pool in pools for b in pool.v_buffer]
        self.assertEqual(expected, joined.get_contiguous_buf_infos()[0])

    def test_all_else_is_the_first_pools(self):
        pools = [mha_pool(), mha_pool()]
        self.assertEqual(pools[0].head_num, JoinedPools(pools).head_num)
        self.assertFalse(hasattr(JoinedPools(pools), "no_such_thing"))

    def test_pools_with_buffers_of_their_own_travel_as_before_and_say_so(self):
        pools = [mha_pool(), mha_pool()]
        for pool in pools:
            pool.get_state_buf_infos = lambda: ([], [], [])
        with self.assertLogs(draft_transfer.logger, logging.WARNING) as logs:
            registered = draft_transfer.all_pools(scheduler(*map(runner, pools)), pools[0])
        self.assertIs(pools[0], registered)
        self.assertIn("first of 2", logs.output[0])

    def test_both_transfer_queues_register_what_all_pools_returns(self):
        from sglang.srt.disaggregation import decode, prefill

        for queue in (prefill.PrefillBootstrapQueue, decode.DecodePreallocQueue):
            names = queue.__init__.__code__.co_names
            self.assertIn("all_pools", names, queue.__name__)


class Layouts(Fresh):
    """What must be equal on both ends, and what may differ."""

    def layout(self, *pools, **changes):
        return DraftLayout.of(scheduler(*map(runner, pools), **changes))

    def test_the_same_draft_is_the_same_layout_whatever_the_ranks(self):
        """A rank's share of the heads depends on its tensor parallel size; the layout must not."""
        self.assertEqual(self.layout(mha_pool(heads=2)), self.layout(mha_pool(heads=4)))

    def test_it_survives_the_way_through_json(self):
        layout = self.layout(mha_pool(), mha_pool(layers=2), topk=4)
        sent = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(layout).items()}
        self.assertEqual(layout, DraftLayout.from_json({**sent, "of a later version": 1}))

    def test_a_draft_on_one_side_only(self):
        ours, theirs = self.layout(mha_pool()), DraftLayout()
        self.assertEqual(["algorithm: prefill none, decode EAGLE"], ours.differences(theirs))
        self.assertEqual(["algorithm: prefill EAGLE, decode none"], theirs.differences(ours))

    def test_another_layer_count(self):
        ours, theirs = self.layout(mha_pool()), self.layout(mha_pool(layers=2))
        self.assertEqual(["layers: prefill 2, decode 1"], ours.differences(theirs))

    def test_another_number_of_pools(self):
        ours, theirs = self.layout(mha_pool(), mha_pool()), self.layout(mha_pool())
        self.assertIn("layers: prefill 1, decode 1 + 1", ours.differences(theirs))

    def test_another_width(self):
        theirs = DraftLayout.of(scheduler(runner(mha_pool(), heads=8)))
        differences = self.layout(mha_pool()).differences(theirs)
        self.assertEqual(["width: prefill 32, decode 16"], differences)

    def test_another_topk(self):
        differences = self.layout(mha_pool()).differences(self.layout(mha_pool(), topk=4))
        self.assertEqual(["topk: prefill 4, decode 1"], differences)

    def test_the_number_of_steps_counts_for_a_multi_layer_draft_alone(self):
        pools = [mha_pool(), mha_pool()]
        self.assertEqual(self.layout(pools[0], steps=2), self.layout(pools[0], steps=5))
        ours = self.layout(*pools, steps=2, multi_layer=True)
        theirs = self.layout(*pools, steps=5, multi_layer=True)
        self.assertEqual(["steps: prefill 5, decode 2"], ours.differences(theirs))


class BootstrapServer:
    """SGLang's own bootstrap server, with its own routes, on a free loopback port."""

    def __init__(self):
        self.server = conn.CommonKVBootstrapServer.__new__(conn.CommonKVBootstrapServer)
        self.server.app = web.Application()
        self.server._setup_routes()
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self.thread.start()
        started.wait()

    def _serve(self, started):
        asyncio.set_event_loop(self.loop)
        runner = web.AppRunner(self.server.app)
        self.loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self.loop.run_until_complete(site.start())
        self.address = f"127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        self.loop.run_forever()
        self.loop.run_until_complete(runner.cleanup())
        self.loop.close()

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


class Manager:
    """What a receiver asks of its manager."""

    def __init__(self, address):
        self.prefill_info_table = {address: SimpleNamespace()}
        self.failures, self.statuses = {}, {}

    def record_failure(self, room, reason):
        self.failures[room] = reason

    def update_status(self, room, status):
        self.statuses[room] = status


class Handshake(Fresh):
    """From a prefill rank's registration to the verdict on a decode server's request."""

    def setUp(self):
        super().setUp()
        self.bootstrap = BootstrapServer()
        self.addCleanup(self.bootstrap.close)

    def register(self, *pools):
        """A prefill rank with these draft pools registers."""
        draft_transfer.all_pools(scheduler(*map(runner, pools)), pools[0] if pools else None)
        sent = []
        original = requests.put

        def put(url, **arguments):
            sent.append(url)
            return original(url, **arguments) if url.endswith(draft_transfer.ROUTE) else "reply"

        with mock.patch.object(draft_transfer.requests, "put", put):
            reply = draft_transfer.put(
                f"http://{self.bootstrap.address}/route", json={"rank": 0}, timeout=5
            )
        self.assertEqual("reply", reply)
        return [url.rsplit("/", 1)[1] for url in sent]

    def handshake(self, *pools):
        """A decode server with these draft pools meets the prefill; the manager afterwards."""
        draft_transfer.all_pools(scheduler(*map(runner, pools)), pools[0] if pools else None)
        manager = Manager(self.bootstrap.address)
        self.receiver = SimpleNamespace(
            kv_mgr=manager,
            bootstrap_addr=self.bootstrap.address,
            bootstrap_room=ROOM,
            conclude_state=None,
            # SGLang's own abort tells prefill, then records a reason that names nothing.
            abort=lambda: (
                self.steps.append("abort"),
                manager.record_failure(ROOM, "Aborted by AbortReq."),
            ),
        )
        self.steps = []
        info = manager.prefill_info_table[self.bootstrap.address]
        draft_transfer.compare(info, self.bootstrap.address)
        draft_transfer.checked(lambda receiver, rank: self.steps.append(rank))(self.receiver, 3)
        return manager

    def test_the_layout_is_there_before_the_rank_is(self):
        """Decode asks as soon as all ranks are registered."""
        self.assertEqual([draft_transfer.ROUTE[1:], "route"], self.register(mha_pool()))

    def test_ends_that_draft_alike_go_on(self):
        self.register(mha_pool())
        manager = self.handshake(mha_pool())
        self.assertEqual([3], self.steps)
        self.assertEqual({}, manager.failures)

    def test_ends_that_do_not_draft_go_on(self):
        self.register()
        self.handshake()
        self.assertEqual([3], self.steps)

    def test_a_mismatch_fails_the_request_and_names_both_sides(self):
        for prefill, decode, told in (
            ([mha_pool()], [], "prefill EAGLE, decode none"),
            ([], [mha_pool()], "prefill none, decode EAGLE"),
            ([mha_pool(layers=2)], [mha_pool()], "layers: prefill 2, decode 1"),
        ):
            with self.subTest(told):
                self.bootstrap.server.draft_layout = None
                self.register(*prefill)
                with self.assertLogs(draft_transfer.logger, logging.ERROR):
                    manager = self.handshake(*decode)
                self.assertEqual([3, "abort"], self.steps)
                self.assertIn(told, manager.failures[ROOM])
                self.assertIn(self.bootstrap.address, manager.failures[ROOM])
                self.assertEqual(KVPoll.Failed, manager.statuses[ROOM])
                self.assertEqual(KVPoll.Failed, self.receiver.conclude_state)

    def test_a_request_asks_nobody(self):
        """The decode loop sets requests up; it must not wait for a prefill there."""
        self.register(mha_pool())
        manager = self.handshake(mha_pool())
        with mock.patch.object(draft_transfer.requests, "get", side_effect=AssertionError):
            for _ in range(3):
                draft_transfer.checked(lambda *_: None)(self.receiver, 3)
        self.assertEqual({}, manager.failures)

    def test_a_prefill_that_says_nothing_is_taken_as_it_is(self):
        """One without this patch, or one whose registry is not Python's."""
        manager = self.handshake(mha_pool())
        self.assertEqual([3], self.steps)
        self.assertEqual({}, manager.failures)

    def test_the_override_asks_nothing(self):
        self.register()
        with mock.patch.dict(os.environ, {draft_transfer.UNCHECKED: "1"}):
            self.handshake(mha_pool())
        self.assertEqual([3], self.steps)

    def test_the_stage_that_drafts_speaks_for_its_pipeline(self):
        for stages in (([mha_pool()], []), ([], [mha_pool()])):
            self.bootstrap.server.draft_layout = None
            for pools in stages:
                self.register(*pools)
            self.handshake(mha_pool())
            self.assertEqual([3], self.steps)

    def test_a_prefill_that_is_gone_is_upstreams_business(self):
        draft_transfer.all_pools(scheduler(), None)
        receiver = SimpleNamespace(
            kv_mgr=SimpleNamespace(prefill_info_table={}), bootstrap_addr="gone"
        )
        reached = []
        draft_transfer.checked(lambda *_: reached.append(1))(receiver, 3)
        self.assertEqual([1], reached)

    def test_receivers_and_registrations_go_through_the_check(self):
        if "init" in vars(conn.CommonKVReceiver):
            self.assertTrue(hasattr(conn.CommonKVReceiver.init, "__wrapped__"))
            ask = conn.CommonKVManager.try_ensure_parallel_info
            self.assertIn("compare", ask.__code__.co_names)
        else:
            fetch = conn.CommonKVReceiver._get_prefill_parallel_info_from_server
            self.assertTrue(hasattr(fetch, "__wrapped__"))
        names = ("_register_topology_row", "register_to_bootstrap", "_register_to_bootstrap")
        register = next(
            getattr(conn.CommonKVManager, name)
            for name in names
            if hasattr(conn.CommonKVManager, name)
        )
        self.assertIn("draft_transfer", register.__code__.co_names)

    def test_without_info_objects_a_mismatch_looks_like_a_prefill_that_is_gone(self):
        """0.5.9 has no such object and fails the request for want of the prefill's sizes."""
        self.register()
        draft_transfer.all_pools(scheduler(runner(mha_pool())), mha_pool())
        fetch = draft_transfer.checked_at_birth(lambda _: (1, 1, 1, 16))
        receiver = SimpleNamespace(bootstrap_addr=self.bootstrap.address)
        with self.assertLogs(draft_transfer.logger, logging.ERROR):
            self.assertEqual((None,) * 4, fetch(receiver))
        self.register(mha_pool())
        draft_transfer.all_pools(scheduler(runner(mha_pool())), mha_pool())
        self.assertEqual((1, 1, 1, 16), fetch(receiver))


if __name__ == "__main__":
    unittest.main()
