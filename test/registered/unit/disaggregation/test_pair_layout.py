# SPDX-License-Identifier: Apache-2.0
"""Two ends that serve different models or KV caches fail their requests, and name both values."""

import asyncio
import contextlib
import logging
import os
import sys
import threading
import unittest
from types import SimpleNamespace
from unittest import mock

import requests
import torch
from aiohttp import web
from sglang.srt.disaggregation import draft_transfer, pair_layout
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.draft_transfer import DraftLayout
from sglang.srt.disaggregation.pair_layout import PairLayout
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

ROOM = 77


def scheduler(
    layers=1, hidden=64, vocab=512, heads=2, dtype=torch.float32, name="LlamaForCausalLM"
):
    """One that serves such a model from a real pool."""
    pool = MHATokenToKVPool(
        size=16,
        page_size=4,
        dtype=dtype,
        head_num=heads,
        head_dim=16,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[name]),
        num_hidden_layers=layers,
        hidden_size=hidden,
        vocab_size=vocab,
        head_dim=16,
        get_total_num_kv_heads=lambda: heads,
    )
    return SimpleNamespace(
        model_config=config,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
    )


class BootstrapServer:
    """SGLang's own bootstrap server, all its routes, on a free loopback port."""

    def __init__(self):
        self.server = conn.CommonKVBootstrapServer.__new__(conn.CommonKVBootstrapServer)
        self.server.app = web.Application()
        self.server._setup_routes()
        self.loop, ready = asyncio.new_event_loop(), threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self.thread.start()
        ready.wait()

    def _serve(self, ready):
        asyncio.set_event_loop(self.loop)
        runner = web.AppRunner(self.server.app)
        self.loop.run_until_complete(runner.setup())
        self.loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.address = f"127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        self.loop.run_forever()
        self.loop.run_until_complete(runner.cleanup())

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class Manager(conn.CommonKVManager):
    """A real manager as far as it asks a prefill how it is laid out."""

    def __init__(self, flag="auto"):
        self.prefill_info_table, self.failures, self.statuses = {}, {}, {}
        self.kv_args = SimpleNamespace(page_size=4, state_types=[])
        self.server_args = SimpleNamespace(kv_cache_dtype=flag, enable_hisparse=False)
        self.kv_cache_dtype_str, self.kv_layout, self.dsv41_spec_layout = flag, None, None
        self.attn_tp_size = self.attn_cp_size = self.dcp_size = 1
        self.is_mla_backend = self.is_hybrid_mla_backend = False

    def _resolve_rank_mapping(self, info):
        pass

    def record_failure(self, bootstrap_room, failure_reason):
        self.failures[bootstrap_room] = failure_reason

    def update_status(self, bootstrap_room, status):
        self.statuses[bootstrap_room] = status


class Fresh(unittest.TestCase):
    def setUp(self):
        os.environ.pop(pair_layout.UNCHECKED, None)
        for module, layout in ((pair_layout, PairLayout()), (draft_transfer, DraftLayout())):
            patch = mock.patch.object(module, "_own", layout)
            patch.start()
            self.addCleanup(patch.stop)


class TestLayout(unittest.TestCase):
    def test_it_is_read_off_a_real_pool(self):
        layout = PairLayout.of(scheduler(layers=3, heads=2, dtype=torch.bfloat16))
        self.assertIn("LlamaForCausalLM of 3 layers", layout.model)
        self.assertEqual((layout.kv_width, layout.kv_dtype), (32, "bfloat16"))

    def test_a_latent_cache_is_as_wide_as_its_rows(self):
        served = scheduler()
        pool = SimpleNamespace(kv_cache_dim=576, dtype=torch.bfloat16)
        served.token_to_kv_pool_allocator.get_kvcache = lambda: pool
        self.assertEqual(PairLayout.of(served).kv_width, 576)

    def test_what_one_end_does_not_say_is_no_difference(self):
        whole = PairLayout.of(scheduler())
        for part in ({}, {"model": whole.model}, {"from": "a newer one"}):
            self.assertEqual(whole.differences(PairLayout.from_json(part)), [])
            self.assertEqual(PairLayout.from_json(part).differences(whole), [])

    def test_each_difference_names_both_values(self):
        ours = PairLayout.of(scheduler())
        for other, told in (
            ({"layers": 2}, "of 2 layers"),
            ({"hidden": 128}, "hidden size 128"),
            ({"vocab": 513}, "vocabulary 513"),
            ({"name": "QwenForCausalLM"}, "QwenForCausalLM"),
            ({"heads": 4}, "kv_width: prefill 64, decode 32"),
            ({"dtype": torch.bfloat16}, "kv_dtype: prefill bfloat16, decode float32"),
        ):
            with self.subTest(told):
                [said] = ours.differences(PairLayout.of(scheduler(**other)))
                self.assertIn(told, said)
                self.assertRegex(said, "prefill .+, decode .+")


class TestHandshake(Fresh):
    """From a prefill rank's announcement to the verdict on a request."""

    def setUp(self):
        super().setUp()
        self.bootstrap = BootstrapServer()
        self.addCleanup(self.bootstrap.close)
        self.asked = []

    def ensure(self, manager, flag="auto"):
        """SGLang's own look-up of a prefill, whose sizes are right."""
        sizes = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 4}
        body = {**sizes, "kv_cache_dtype": flag, "follow_bootstrap_room": True}
        original = requests.get

        def get(url, **given):
            if "/route?" not in url:
                return original(url, **given)
            return SimpleNamespace(status_code=200, json=lambda: body, text="")

        lookup = sys.modules.get("sglang.srt.disaggregation.prefill_lookup")  # from 0.5.16 on
        with contextlib.ExitStack() as stack:
            for module in (requests, lookup) if lookup else (requests,):
                stack.enter_context(mock.patch.object(module, "get", get))
            return manager.try_ensure_parallel_info(self.bootstrap.address)

    def meet(self, prefill, decode, flag="auto"):
        """A request of `decode` to `prefill`; the manager afterwards."""
        pair_layout.note(prefill)
        pair_layout.announce(f"http://{self.bootstrap.address}/route")
        pair_layout.note(decode)
        manager = Manager()
        self.assertTrue(self.ensure(manager, flag))
        self.steps = []
        self.receiver = SimpleNamespace(
            kv_mgr=manager,
            bootstrap_addr=self.bootstrap.address,
            bootstrap_room=ROOM,
            conclude_state=None,
            abort=lambda: self.steps.append("abort"),
        )
        draft_transfer.checked(lambda _, rank: self.steps.append(rank))(self.receiver, 0)
        return manager

    def test_ends_that_fit_go_on(self):
        manager = self.meet(scheduler(), scheduler())
        self.assertEqual((self.steps, manager.failures), ([0], {}))

    def test_another_model_fails_the_request_on_both_ends(self):
        for other in ({"layers": 2}, {"dtype": torch.bfloat16}, {"heads": 1}):
            with self.subTest(other), self.assertLogs(pair_layout.logger, logging.ERROR):
                manager = self.meet(scheduler(**other), scheduler())
                self.assertEqual(self.steps, [0, "abort"])
                self.assertRegex(manager.failures[ROOM], "prefill .+, decode .+")
                self.assertIn(self.bootstrap.address, manager.failures[ROOM])
                self.assertEqual(manager.statuses[ROOM], KVPoll.Failed)

    def test_another_flag_fails_the_request_and_not_the_server(self):
        with self.assertLogs(pair_layout.logger, logging.ERROR):
            manager = self.meet(scheduler(), scheduler(), flag="fp8_e4m3")
        self.assertEqual(self.steps, [0, "abort"])
        self.assertIn("kv_cache_dtype=fp8_e4m3", manager.failures[ROOM])
        self.assertIn("kv_cache_dtype=auto", manager.failures[ROOM])

    def test_a_prefill_that_says_nothing_is_taken_as_it_is(self):
        pair_layout.note(scheduler())
        self.assertTrue(self.ensure(Manager()))

    def test_what_means_nothing_is_not_kept(self):
        url = f"http://{self.bootstrap.address}{pair_layout.ROUTE}"
        self.assertEqual(requests.put(url, json=[1], timeout=5).status_code, 400)
        self.assertEqual(requests.get(url, timeout=5).status_code, 404)

    def test_the_override_compares_nothing(self):
        with mock.patch.dict(os.environ, {pair_layout.UNCHECKED: "1"}):
            manager = self.meet(scheduler(layers=2), scheduler())
        self.assertEqual((self.steps, manager.failures), ([0], {}))

    def test_registrations_announce_what_they_serve(self):
        names = ("_register_topology_row", "register_to_bootstrap")
        register = next(
            getattr(conn.CommonKVManager, name)
            for name in names
            if hasattr(conn.CommonKVManager, name)
        )
        self.assertIn("pair_layout", register.__code__.co_names)


if __name__ == "__main__":
    unittest.main()
