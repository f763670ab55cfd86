# SPDX-License-Identifier: Apache-2.0
"""A hit that the scheduler sees is whole pages, equal on all ranks, and locked as such."""

import itertools
import sys
import threading
import unittest
from array import array
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from sglang.srt.disaggregation import decode
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import CacheAwarePolicy, SchedulePolicy
from sglang.srt.mem_cache import common, page_contract
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.test.ci.ci_register import register_cpu_ci

sys.path.insert(0, str(Path(__file__).parents[1] / "disaggregation"))
from transfer_ends import OFF, Record, instance

try:  # from 0.5.11 on a streaming session lends its row to its next turn
    from sglang.srt.session.streaming_session import SessionSlot, StreamingSession
except ImportError:
    StreamingSession = None

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

PAGE = 64
HITS = (0, 1, 63, 64, 65, 127, 128)
FIRST_SLOT = 10_000  # slot of the tree's first token; request rows begin at 0
USES_ARRAYS = hasattr(schedule_batch, "array")  # token ids, from 0.5.12 on
EXACT_LENGTHS = hasattr(common, "match_kv_cache")  # a prefix is a length, from 0.5.22 on


def tokens(values):
    return array("q", values) if USES_ARRAYS else list(values)


class Allocator:
    """An allocator of pages that notes what comes back."""

    device = "cpu"
    dtype = torch.int64

    def __init__(self, page_size):
        self.page_size = page_size
        self.freed = []

    def free(self, slots):
        self.freed += slots.tolist()

    def __getattr__(self, name):
        if name.startswith("free_"):  # later releases free by kind of pool
            return lambda slots, *_, **__: self.free(slots)
        raise AttributeError(name)


class Rows:
    """Request rows; row 0 holds a request's slots in order."""

    device = "cpu"

    def __init__(self):
        self.req_to_token = torch.arange(8192).view(1, -1).clone()
        self.returned = []

    def write(self, where, slots):
        self.req_to_token[where] = slots

    def free(self, req):
        self.returned.append(req)


def tree_of(cached, page=PAGE, eagle=False, tree_page=1):
    """SGLang's radix tree with `cached` tokens (pairs under EAGLE) of the prompt 0, 1, 2, …"""
    tree = RadixCache(parts(page, eagle, tree_page))
    if cached:
        fill(tree, cached, eagle)
    return tree


def parts(page=PAGE, eagle=False, tree_page=1):
    """What a tree is made of."""
    return CacheInitParams(False, Rows(), Allocator(page), tree_page, is_eagle=eagle)


def fill(tree, cached, eagle=False):
    """Cache so many tokens (pairs under EAGLE) of the prompt."""
    ids = tokens(range(cached + eagle))
    slots = torch.arange(FIRST_SLOT, FIRST_SLOT + len(ids))
    tree.insert(InsertParams(key=RadixKey(ids, None), value=slots[:cached]))


class Request(Req):
    """A request of which tests name the fields that matter; the others are off."""

    def __init__(self, fields):
        vars(self).update(fields)

    def __getattr__(self, name):
        if name == "prefix_len" or name.startswith("__"):
            raise AttributeError(name)
        return OFF


def request(prompt, shared, **fields):
    """A request whose first `shared` tokens are the cached prompt's, and whose others are not."""
    ids = tokens([*range(shared), *range(20_000, 20_000 + prompt - shared)])
    kv = Record(cache_protected_len=0, cache_inserted_len=0, req_pool_idx=0, swa_evict_floor=0)
    given = {
        "rid": "r",
        "kv": kv,
        "req_pool_idx": 0,
        "origin_input_ids": ids,
        "output_ids": tokens([]),
        "fill_ids": ids,
        "full_untruncated_fill_ids": ids,
        "fill_len": prompt,
        "extra_key": None,
        "cache_salt": None,
        "dllm_config": None,
        "dllm_phase": None,
        "session": None,
        "positional_embed_overrides": None,
        "multimodal_inputs": None,
        "return_logprob": False,
        "is_retracted": False,
        "host_hit_length": 0,
        "prefix_indices": torch.empty(0, dtype=torch.int64),
        "cache_protected_len": 0,
        "swa_evict_floor": 0,
        "priority": 0,
        "mamba_pool_idx": None,
        "logprob_start_len": -1,
        "finished_reason": None,
        "lock": None,
    }
    if EXACT_LENGTHS:
        given["prefix_len"] = 0
    return Request(given | fields)


def visible(req):
    return req.prefix_len if EXACT_LENGTHS else len(req.prefix_indices)


def protected(req):
    """Tokens of the row that the tree owns; the field moved under `kv` in 0.5.20."""
    return max(vars(req)["cache_protected_len"], req.kv.cache_protected_len)


def match_on_decode(req, tree):
    """SGLang's match of a request that has not been admitted; returns the tokens it protects."""
    queue = instance(
        decode.DecodePreallocQueue,
        tree_cache=tree,
        scheduler=Record(enable_decode_hicache=False),
        token_to_kv_pool_allocator=tree.token_to_kv_pool_allocator,
        _uses_swa_tail_prealloc=lambda: False,
    )
    queue._match_prefix_and_lock(req)
    return tree.protected_size()


HAS_DECODE_RADIX = hasattr(decode.DecodePreallocQueue, "_match_prefix_and_lock")  # from 0.5.11


def lock(req, tree):
    """Take the lock a scheduled request holds; returns the tokens it protects."""
    if hasattr(tree, "lock"):
        req.lock = tree.lock(req.last_node)
    else:
        receipt = tree.inc_lock_ref(req.last_node)
        req.lock_receipt = getattr(receipt, "to_dec_params", lambda: None)()
    return tree.protected_size()


class TestVisibleHit(unittest.TestCase):
    def each(self, check):
        """`check` a request whose first tokens make this hit, and whose others are new."""
        for hit, eagle in itertools.product(HITS, (False, True)):
            with self.subTest(hit=hit, eagle=eagle):
                # One shared token more makes `hit` pairs.
                req = request(hit + eagle + 100, hit + eagle)
                check(req, tree_of(hit, eagle=eagle), hit // PAGE * PAGE)

    def test_a_new_round_sees_whole_pages(self):
        def check(req, tree, whole):
            req.init_next_round_input(tree)
            self.assertEqual((visible(req), protected(req)), (whole, whole))
            self.assertEqual(lock(req, tree), whole)

        self.each(check)

    @unittest.skipUnless(HAS_DECODE_RADIX, "decode has no radix cache in this release")
    def test_decode_locks_whole_pages(self):
        def check(req, tree, whole):
            self.assertEqual(match_on_decode(req, tree), whole)
            self.assertEqual(visible(req), whole)

        self.each(check)

    def test_a_token_is_left_to_compute(self):
        for prompt in (1, PAGE, 2 * PAGE):
            with self.subTest(prompt=prompt):
                req = request(prompt, prompt)
                req.init_next_round_input(tree_of(prompt))
                self.assertEqual(visible(req), (prompt - 1) // PAGE * PAGE)

    def test_the_page_of_decode_context_parallel_ranks_is_all_of_theirs(self):
        for hit, whole in ((PAGE, 0), (2 * PAGE, 2 * PAGE), (3 * PAGE, 2 * PAGE)):
            with self.subTest(hit=hit):
                req = request(hit + 100, hit)
                req.init_next_round_input(tree_of(hit, page=2 * PAGE, tree_page=PAGE))
                self.assertEqual(visible(req), whole)

    def test_pages_of_one_token_change_nothing(self):
        for hit in HITS:
            with self.subTest(hit=hit):
                req = request(hit + 100, hit)
                req.init_next_round_input(tree_of(hit, page=1))
                self.assertEqual(visible(req), hit)

    @unittest.skipIf(StreamingSession is None, "sessions have no rows in this release")
    def test_a_streaming_session_gets_its_own_row_back_to_the_token(self):
        session = SimpleNamespace(streaming=True, session_id="s")
        req = request(200, 100, session=session, to_finish=None)
        tree = SessionTree(parts())
        req.init_next_round_input(tree)
        self.assertEqual(visible(req), 0, "the first turn has no row: its hit is the tree's")
        tree.lend("s", committed=100, owned_by_tree=PAGE)
        req.init_next_round_input(tree)
        self.assertEqual((visible(req), protected(req)), (100, PAGE))

    def test_a_recurrent_state_is_copied_once_for_the_hit_that_is_seen(self):
        tree = StateTree(parts())
        fill(tree, 65)
        req = request(200, 65)
        req.init_next_round_input(tree)
        self.assertEqual(visible(req), PAGE)
        self.assertEqual([copied for _, copied in tree.matches].count(True), 1)
        self.assertEqual(tree.matches[-1], (PAGE, True))


class SessionTree(RadixCache):
    """SGLang's streaming session in front of its tree, as its unified tree has it."""

    def __init__(self, params):
        super().__init__(params)
        self.session = StreamingSession(self)

    def lend(self, session_id, committed, owned_by_tree):
        """Give the session a row with so many tokens, the first of them the tree's."""
        fields = {
            "req_pool_idx": 0,
            "kv_committed_len": committed,
            "kv_allocated_len": committed,
            "cache_protected_len": owned_by_tree,
        }
        slot = SessionSlot()
        vars(slot).update(fields)
        slot.kv = Record(**fields, holds_kv=True, swa_evicted_seqlen=0, max_evicted_seqlen=0)
        slot.kv.swa_evict_floor = 0
        self.session.slots[session_id] = slot

    def match_prefix(self, params):
        return self.session.try_match_prefix(params) or super().match_prefix(params)


class StateTree(RadixCache):
    """A tree that has a recurrent state for a request to copy, with what was asked of it."""

    def __init__(self, params):
        super().__init__(params)
        self.matches = []

    def supports_mamba(self):
        return True

    def match_prefix(self, params):
        result = super().match_prefix(params)
        self.matches.append((page_contract._hit(result), params.cow_mamba))
        return result


class Ranks:
    """Ranks as threads, each with its own tree; a reduction waits for all of them."""

    def __init__(self, count):
        self.here = threading.local()
        self.barrier = threading.Barrier(count)
        self.values = [None] * count
        self.messages = 0

    def all_reduce(self, tensor, op=None, group=None):
        assert op == dist.ReduceOp.MIN
        self.messages += 1
        self.values[self.here.rank] = tensor.clone()
        self.barrier.wait(timeout=30)
        tensor.copy_(torch.stack(self.values).min(dim=0).values)
        self.barrier.wait(timeout=30)

    def run(self, hits, prompt, page, see=Request.init_next_round_input):
        """What each rank's request sees, in tokens, with these hits on a hierarchical tree."""
        seen = [None] * len(hits)

        def rank(index):
            self.here.rank = index
            tree = tree_of(hits[index], page=page)
            tree.cache_controller, tree.attn_cp_group = object(), object()
            req = request(prompt, max(hits))
            see(req, tree)
            seen[index] = (visible(req), lock(req, tree))

        patched = {
            "all_reduce": self.all_reduce,
            "get_world_size": lambda group=None: len(hits),
        }
        with mock.patch.multiple(page_contract.dist, **patched):
            threads = [threading.Thread(target=rank, args=(i,)) for i in range(len(hits))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return seen


def order(req, tree):
    """Let SGLang's policy look at what a waiting request has cached, to put the queue in order."""
    policy = instance(
        SchedulePolicy,
        tree_cache=tree,
        waiting_queue_radix_tree=RadixCache.create_simulated(),
    )
    policy._compute_prefix_matches([req], CacheAwarePolicy.LPM)


class TestRanksAgree(unittest.TestCase):
    def test_every_rank_sees_the_smallest_hit(self):
        for hits in ([128, 64, 128, 128], [65, 64, 127, 64], [128, 0, 64, 1], [128] * 4):
            with self.subTest(hits=hits):
                whole = min(hits) // PAGE * PAGE
                self.assertEqual(Ranks(4).run(hits, 400, PAGE), [(whole, whole)] * 4)

    def test_the_waiting_queue_is_ordered_by_what_every_rank_has(self):
        for hits in ([128, 64, 128, 128], [65, 64, 127, 64]):
            with self.subTest(hits=hits):
                self.assertEqual(Ranks(4).run(hits, 400, PAGE, order), [(PAGE, PAGE)] * 4)

    def test_one_cached_token_of_a_long_prompt(self):
        for page, whole in ((1, 1), (PAGE, 0)):
            with self.subTest(page=page):
                seen = Ranks(4).run([1] * 4, 1 + 3670, page)
                self.assertEqual(seen, [(whole, whole)] * 4)

    def test_trees_on_the_device_alone_need_no_message(self):
        ranks = Ranks(1)
        with mock.patch.multiple(
            page_contract.dist, all_reduce=ranks.all_reduce, get_world_size=lambda group=None: 4
        ):
            tree = tree_of(65)
            tree.attn_cp_group = object()
            request(200, 65).init_next_round_input(tree)
        self.assertEqual(ranks.messages, 0)


class TestTheTreeStaysInOrder(unittest.TestCase):
    def run_on(self, req, tree, upto):
        """Give the request slots after its prefix, as an extend step does."""
        row = tree.req_to_token_pool.req_to_token[0]
        row[:] = torch.arange(len(row))
        row[: visible(req)] = torch.arange(FIRST_SLOT, FIRST_SLOT + visible(req))
        lock(req, tree)
        for holder in (req, req.kv):
            holder.kv_committed_len = holder.kv_allocated_len = upto
            holder.req_pool_idx = 0
        req.kv.holds_kv = True
        req.extend_end = upto
        req.extend_range = SimpleNamespace(start=visible(req), end=upto, length=upto - visible(req))

    def checkpoint(self, req, tree):
        if hasattr(common, "checkpoint_kv_cache"):
            common.checkpoint_kv_cache(req, tree)
        else:
            tree.cache_unfinished_req(req)

    def test_the_refresh_of_an_unfinished_request_is_exact(self):
        tree = tree_of(0, tree_page=PAGE)
        req = request(100, 0)
        req.init_next_round_input(tree)
        self.run_on(req, tree, 100)
        self.checkpoint(req, tree)
        req.init_next_round_input()  # a chunked request goes on without a match
        self.assertEqual((visible(req), protected(req)), (100, PAGE))

    def test_a_shortened_hit_frees_nothing_of_the_tree_and_leaks_nothing(self):
        for hit in (65, 127):
            with self.subTest(hit=hit):
                tree = tree_of(hit)
                req = request(hit + 30, hit)
                req.init_next_round_input(tree)
                self.assertEqual(visible(req), PAGE)
                self.run_on(req, tree, hit + 30)
                self.checkpoint(req, tree)
                freed = tree.token_to_kv_pool_allocator.freed
                own = set(range(PAGE, hit + 30))
                # The tree has the slots up to the hit already, so the request's own come back.
                self.assertEqual(sorted(freed), list(range(PAGE, hit)))
                self.assertLessEqual(set(freed), own)
                self.assertEqual(tree.protected_size(), hit + 30)


if __name__ == "__main__":
    unittest.main()
