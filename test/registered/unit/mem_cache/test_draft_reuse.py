# SPDX-License-Identifier: Apache-2.0
"""A draft takes cached KV only where its own rows were kept and came back."""

import inspect
import logging
import os
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.managers import cache_controller
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation
from sglang.srt.mem_cache import draft_reuse
from sglang.srt.mem_cache.draft_reuse import Reason
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.test.ci.ci_register import register_cpu_ci

try:
    from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
    from sglang.srt.mem_cache.radix_cache import TreeNode
except ImportError:  # gone in 0.5.21
    HiRadixCache = None
try:
    from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
except ImportError:  # from 0.5.10 to 0.5.17
    HiMambaRadixCache = None
try:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
except ImportError:  # from 0.5.11 on
    UnifiedRadixCache = None
try:
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
except ImportError:  # before 0.5.11
    InitLoadBackParams = None
try:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
except ImportError:  # before 0.5.11
    HybridCacheController = None

try:
    from sglang.srt.disaggregation import decode_hicache_mixin
except ImportError:  # before 0.5.13
    decode_hicache_mixin = None

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

PAGE, BATCH = 4, 128
READS_DRAFTS = hasattr(HiCacheController, "_draft_page_get")  # 0.5.11 to 0.5.18
PREALLOC = getattr(decode_hicache_mixin, "DecodeHiCachePreallocMixin", None)
if not hasattr(UnifiedRadixCache, "prefix_device_indices") or (
    "tree_cache.enable_storage" not in inspect.getsource(PREALLOC)
):  # before 0.5.23
    PREALLOC = None
COPIES_DRAFTS = "has_draft" in inspect.getsource(HiCacheController.start_writing)  # to 0.5.17


class Fresh(unittest.TestCase):
    """Every reason may be told again, and nothing is set in the environment."""

    def setUp(self):
        draft_reuse._told.clear()
        os.environ.pop(draft_reuse.UNVERIFIED, None)


def draft_worker(*pools, plan=None):
    runners = tuple(SimpleNamespace(token_to_kv_pool=pool) for pool in pools)
    worker = SimpleNamespace(_draft_model_runners=lambda: runners)
    if plan is not None:
        worker.hicache_draft_plan = SimpleNamespace(device_pools=plan)
    return worker


def scheduler(worker, controller=None):
    return SimpleNamespace(
        draft_worker=worker,
        tree_cache=SimpleNamespace(cache_controller=controller),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: "target"),
    )


def controller_of(cls, *registered):
    """A real controller without its threads, with the draft pool that was registered, if any."""
    controller = cls.__new__(cls)
    controller.has_draft = bool(registered)
    controller.mem_pool_device_draft = registered[0] if registered else None
    return controller


def draft_pool(indexer=False):
    pool = MHATokenToKVPool.__new__(MHATokenToKVPool)
    if indexer:
        pool.index_k_with_scale_buffer = []
    return pool


class Refusal(Fresh):
    """What the host cache keeps, asked of each release's own controllers."""

    def test_nothing_to_refuse_without_a_draft_or_a_host_cache(self):
        self.assertIsNone(draft_reuse.refusal(scheduler(None, object())))
        self.assertIsNone(draft_reuse.refusal(scheduler(draft_worker(draft_pool()), None)))

    def test_a_draft_that_was_not_registered_is_refused(self):
        controller = controller_of(HiCacheController)
        served = scheduler(draft_worker(draft_pool()), controller)
        self.assertIs(Reason.UNSAVED, draft_reuse.refusal(served))

    @unittest.skipUnless(COPIES_DRAFTS, "from 0.5.11 to 0.5.17 the controller copies the draft")
    def test_a_registered_draft_is_taken(self):
        pool = draft_pool()
        served = scheduler(draft_worker(pool), controller_of(HiCacheController, pool))
        self.assertIsNone(draft_reuse.refusal(served))

    @unittest.skipUnless(COPIES_DRAFTS, "from 0.5.11 to 0.5.17 the controller copies the draft")
    def test_the_further_pools_of_a_multi_layer_draft_are_refused(self):
        pools = draft_pool(), draft_pool()
        served = scheduler(draft_worker(*pools), controller_of(HiCacheController, pools[0]))
        self.assertIs(Reason.UNSAVED, draft_reuse.refusal(served))

    @unittest.skipUnless(COPIES_DRAFTS, "from 0.5.11 to 0.5.17 the controller copies the draft")
    def test_a_draft_whose_indexer_keys_are_not_kept_is_refused(self):
        pool = draft_pool(indexer=True)
        served = scheduler(draft_worker(pool), controller_of(HiCacheController, pool))
        self.assertIs(Reason.INDEX, draft_reuse.refusal(served))

    @unittest.skipUnless(HybridCacheController, "no hybrid controller")
    def test_a_controller_that_registers_the_draft_and_does_not_copy_it_is_refused(self):
        """0.5.11 to 0.5.13: the override of the copy routine knows nothing of the draft."""
        pool = draft_pool()
        served = scheduler(draft_worker(pool), controller_of(HybridCacheController, pool))
        copies = "draft" in inspect.getsource(HybridCacheController.start_writing)
        self.assertIs(None if copies else Reason.UNSAVED, draft_reuse.refusal(served))

    def test_a_plan_is_believed(self):
        """0.5.18 and later name the pools they keep; an unpacked plan names the first alone."""
        pools = draft_pool(indexer=True), draft_pool()
        for plan, reason in ((pools, None), (pools[:1], Reason.UNSAVED), ((), Reason.UNSAVED)):
            served = scheduler(draft_worker(*pools, plan=plan), controller_of(HiCacheController))
            self.assertIs(reason, draft_reuse.refusal(served), plan)

    def test_the_tree_is_told_once_at_start(self):
        served = scheduler(draft_worker(draft_pool()), controller_of(HiCacheController))
        draft_reuse.attach(served)
        self.assertIs(Reason.UNSAVED, served.tree_cache.draft_refusal)

    def test_the_override_takes_every_hit(self):
        asked = scheduler(draft_worker(draft_pool()), controller_of(HiCacheController))
        with mock.patch.dict(os.environ, {draft_reuse.UNVERIFIED: "1"}):
            draft_reuse.attach(asked)
        self.assertIsNone(asked.tree_cache.draft_refusal)


class HostHits(Fresh):
    """A refused hit leaves the tree and its pools alone."""

    def trees(self):
        classes = (HiRadixCache, HiMambaRadixCache, UnifiedRadixCache)
        for cls in classes:
            if cls is not None and hasattr(cls, "load_back"):
                yield cls

    def test_every_tree_declines_to_load(self):
        for cls in self.trees():
            with self.subTest(cls.__name__):
                tree = cls.__new__(cls)
                tree.draft_refusal = Reason.UNSAVED
                self.assertFalse(tree.load_back(SimpleNamespace()))

    def test_an_unrefused_hit_is_the_trees_own_business(self):
        for cls in self.trees():
            with self.subTest(cls.__name__):
                tree = cls.__new__(cls)
                tree.draft_refusal = None
                inner = cls.load_back.__wrapped__
                asked = draft_reuse.refuses(mock.create_autospec(inner, return_value="loaded"))
                self.assertEqual("loaded", asked(tree, "node", 7))
                self.assertIsNot(inner, cls.load_back)

    def test_the_reason_is_told_once(self):
        with self.assertLogs(draft_reuse.logger, logging.WARNING) as logs:
            for cls in self.trees():
                tree = cls.__new__(cls)
                tree.draft_refusal = Reason.INDEX
                for _ in range(3):
                    tree.load_back(SimpleNamespace())
        self.assertEqual(1, len(logs.output), logs.output)
        self.assertIn(Reason.INDEX.value, logs.output[0])
        self.assertIn(draft_reuse.UNVERIFIED, logs.output[0])

    @unittest.skipUnless(HiRadixCache, "no HiRadixCache")
    def test_a_declined_hit_ends_at_the_device_prefix(self):
        """Upstream's own answer to a load that was declined: nothing new, and the device node."""
        tree = HiRadixCache.__new__(HiRadixCache)
        tree.draft_refusal = Reason.UNSAVED
        empty = torch.empty((0,), dtype=torch.int64)
        tree._empty_match_result = SimpleNamespace(device_indices=empty)
        tree.device = "cpu"
        on_device, on_host = TreeNode(), TreeNode()
        on_device.value, on_host.value = torch.arange(PAGE), None
        on_host.host_value, on_host.parent = torch.arange(PAGE), on_device
        if InitLoadBackParams is None:
            loaded, node = tree.init_load_back(on_host, PAGE)
        else:
            names = inspect.signature(InitLoadBackParams).parameters
            given = {"best_match_node": on_host, "last_host_node": on_host, "host_hit_length": PAGE}
            params = InitLoadBackParams(**{k: v for k, v in given.items() if k in names})
            loaded, node = tree.init_load_back(params)
        self.assertEqual(0, len(loaded))
        self.assertIs(on_device, node)


@unittest.skipUnless(PREALLOC, "decode loads for a draft from 0.5.23 on")
class Promises(Fresh):
    """Decode promises prefill no token that it is not going to load."""

    def match(self, refusal, host=2 * PAGE, stored=0, own=PAGE):
        tree = SimpleNamespace(
            draft_refusal=refusal,
            prefix_device_indices=lambda _: torch.arange(own),
            enable_storage=bool(stored),
            is_backuped=lambda _: True,
            get_last_hash_value=lambda _: "hash",
            hicache_storage_pass_prefix_keys=False,
            query_storage_hit_length=lambda *_, **__: stored,
        )
        queue = SimpleNamespace(
            tree_cache=tree, scheduler=SimpleNamespace(enable_decode_hicache=True)
        )
        req = SimpleNamespace(origin_input_ids=[*range(64)], extra_key=None, cache_salt=None)
        result = SimpleNamespace(
            host_hit_length=host, last_device_node="device", last_host_node="host"
        )
        return PREALLOC._build_decode_prefix_match(queue, req, result)

    def test_without_a_refusal_the_match_is_upstreams(self):
        match = self.match(None, stored=PAGE)
        self.assertEqual(4 * PAGE, match.decode_prefix_len)
        self.assertEqual("host", match.last_host_node)

    def test_a_refused_hit_is_the_device_prefix(self):
        with self.assertLogs(draft_reuse.logger, logging.WARNING) as logs:
            matches = [self.match(Reason.UNSAVED, stored=PAGE) for _ in range(3)]
        for match in matches:
            self.assertEqual(PAGE, match.decode_prefix_len)
            self.assertFalse(match.needs_local_restore)
            self.assertEqual("device", match.last_device_node)
            self.assertIsNone(match.last_host_node)
        self.assertEqual(1, len(logs.output), logs.output)

    def test_a_hit_on_the_device_alone_says_nothing(self):
        with self.assertNoLogs(draft_reuse.logger, logging.WARNING):
            self.assertEqual(PAGE, self.match(Reason.UNSAVED, host=0).decode_prefix_len)


class HostPages:
    """Host pool of the draft: a page is NaN until storage's copy is written to it."""

    def __init__(self, pages):
        self.pages = torch.full((pages,), float("nan"))

    def get_dummy_flat_data_page(self):
        return torch.zeros(1)

    def set_from_flat_data_page(self, index, page):
        self.pages[int(index) // PAGE] = page.item()


@unittest.skipUnless(READS_DRAFTS, "from 0.5.11 to 0.5.18 the controller reads draft pages itself")
class StorageHits(Fresh):
    """A storage hit is as long as the draft's pages are there for it."""

    def transfer(self, pages, present, generic=True):
        """Fetch `pages` pages of which the draft's first `present` are in storage."""
        controller = HiCacheController.__new__(HiCacheController)
        controller.page_size, controller.storage_batch_size = PAGE, BATCH
        controller.has_draft = True
        controller.mem_pool_host_draft = HostPages(pages)
        # Pages past the missing one are there: they must not count.
        controller.storage_backend = SimpleNamespace(
            batch_get=lambda keys, _: self.found(keys, present),
            batch_get_v2=lambda transfers: {
                "draft": [page is not None for page in self.found(transfers[0].keys, present)]
            },
        )
        if hasattr(HiCacheController, "_draft_page_get_generic"):
            name = "_draft_page_get_generic" if generic else "_draft_page_get_v2"
            controller.draft_page_get_func = getattr(controller, name)
        controller.page_get_func = lambda operation, hashes, indices, _: operation.increment(
            len(hashes) * PAGE
        )
        operation = PrefetchOperation.__new__(PrefetchOperation)
        arguments = {"request_id": "r", "host_indices": None, "token_ids": []}
        names = inspect.signature(PrefetchOperation).parameters
        operation.__init__(**{k: v for k, v in arguments.items() if k in names})
        operation.host_indices = torch.arange(pages * PAGE)
        operation.hash_value = [f"{i}" for i in range(pages)]
        with mock.patch.object(cache_controller, "STORAGE_BATCH_SIZE", BATCH, create=True):
            controller._page_transfer(operation)
        return controller, operation

    def found(self, keys, present):
        if present is None:
            raise ConnectionError("storage is gone")
        numbers = [int("".join(filter(str.isdigit, key))) for key in keys]
        return [None if number == present else torch.ones(1) for number in numbers]

    def test_a_whole_hit_stays_whole(self):
        controller, operation = self.transfer(pages=5, present=5)
        self.assertEqual(5 * PAGE, operation.completed_tokens)
        self.assertFalse(operation.is_terminated())
        self.assertFalse(controller.mem_pool_host_draft.pages.isnan().any())

    def test_a_missing_draft_page_ends_the_hit_before_it(self):
        controller, operation = self.transfer(pages=5, present=3)
        self.assertEqual(3 * PAGE, operation.completed_tokens)
        self.assertTrue(operation.is_terminated())
        taken = controller.mem_pool_host_draft.pages[: operation.completed_tokens // PAGE]
        self.assertFalse(taken.isnan().any())

    def test_no_later_batch_is_taken_after_a_short_one(self):
        _, operation = self.transfer(pages=BATCH + 9, present=BATCH - 1)
        self.assertEqual((BATCH - 1) * PAGE, operation.completed_tokens)

    def test_a_failing_storage_gives_no_hit(self):
        _, operation = self.transfer(pages=5, present=None)
        self.assertEqual(0, operation.completed_tokens)
        self.assertTrue(operation.is_terminated())

    @unittest.skipUnless(hasattr(HiCacheController, "_draft_page_get_v2"), "0.5.13 and later")
    def test_a_transfer_by_pool_is_cut_alike(self):
        _, operation = self.transfer(pages=5, present=2, generic=False)
        self.assertEqual(2 * PAGE, operation.completed_tokens)

    def test_the_cut_is_told_once(self):
        with self.assertLogs(draft_reuse.logger, logging.WARNING) as logs:
            for present in (1, 2):
                self.transfer(pages=5, present=present)
        self.assertEqual(1, len(logs.output), logs.output)
        self.assertIn("1 of 5 pages", logs.output[0])

    def test_the_override_takes_the_whole_hit(self):
        with mock.patch.dict(os.environ, {draft_reuse.UNVERIFIED: "1"}):
            _, operation = self.transfer(pages=5, present=3)
        self.assertEqual(5 * PAGE, operation.completed_tokens)


class Verdicts(Fresh):
    """What storage backends answer, read as a number of leading pages."""

    def test_leading_pages(self):
        page = torch.ones(1)
        for found, pages in (
            ([page, page], 2),
            ([page, None, page], 1),
            ([None], 0),
            ([True, False, True], 1),
            ({"draft": [True, True]}, 2),
            ({}, 0),
            (None, 0),
            (3, 3),
            (True, 0),
        ):
            controller = SimpleNamespace(draft_read=draft_reuse.DraftRead())
            draft_reuse.note_pages(controller, found)
            self.assertEqual(pages, controller.draft_read.pages, found)


if __name__ == "__main__":
    unittest.main()
