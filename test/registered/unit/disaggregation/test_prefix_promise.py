# SPDX-License-Identifier: Apache-2.0
"""The prefix that decode promises is whole pages on both ends, and is restored to the token."""

import asyncio
import contextlib
import itertools
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.disaggregation import decode, final_chunk, prefill
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager, MooncakeKVReceiver
from sglang.srt.mem_cache import page_contract
from sglang.test.ci.ci_register import register_cpu_ci

sys.path.insert(0, str(Path(__file__).parent))
import transfer_ends as ends
from transfer_ends import OFF, PAGE, ROOM, Record, instance

try:  # from 0.5.13 on decode may restore a prefix from its host and storage tiers
    from sglang.srt.disaggregation import decode_hicache_mixin as hicache
except ImportError:
    hicache = None

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

PREFILL = "10.0.0.1:8998"
HAS_PREFIX = hasattr(common.CommonKVSender, "pop_decode_prefix_len") or hasattr(
    common.BaseKVSender, "pop_decode_prefix_len"
)  # from 0.5.11
ASKS_ITS_MANAGER = hasattr(common.CommonKVManager, "try_ensure_parallel_info")  # from 0.5.10


class Receiver(MooncakeKVReceiver):
    """SGLang's receiver; what it would send to prefill is noted."""

    __getattr__ = Record.__getattr__

    def __init__(self, manager):
        self.kv_mgr = manager
        self.bootstrap_room, self.bootstrap_addr, self.bootstrap_infos = ROOM, PREFILL, []
        self.conclude_state = self.init_time = self._abort_generation = None
        self.abort_notified = False
        self._owns_bootstrap_room = True
        self._lifecycle_lock = OFF
        self.promised = []

    def note(self, pages, aux_index=None, state_indices=None, decode_prefix_len=0, **_):
        self.promised.append((len(pages), decode_prefix_len or 0))


# Up to 0.5.9 `init` tells prefill where to write.
setattr(Receiver, "send_metadata" if ASKS_ITS_MANAGER else "init", Receiver.note)
if not ASKS_ITS_MANAGER:
    Receiver.__getattr__ = lambda self, name: (
        object.__getattribute__(self, name) if name == "send_metadata" else OFF
    )


def decode_manager(**fields):
    given = {
        "request_status": {ROOM: KVPoll.WaitingForInput},
        "failure_records": {},
        "failure_lock": OFF,
        "kv_args": Record(page_size=PAGE, state_types=[], kv_data_ptrs=[]),
        "server_args": Record(kv_cache_dtype="auto"),
        "kv_cache_dtype_str": "auto",
        "prefill_info_table": {},
        "deferred_bootstrap": None,
        "_deferred_ack_targets": {},
        "_deferred_ack_poisoned_rooms": set(),
        "_staging_outstanding": {},
        "dsv41_spec_layout": None,
        "dcp_size": 1,
        "_resolve_rank_mapping": lambda info: None,
    }
    return instance(MooncakeKVManager, **(given | fields))


def answering(asked):
    """A bootstrap server that gives these answers, however decode asks it."""
    stack = contextlib.ExitStack()
    lookup = sys.modules.get("sglang.srt.disaggregation.prefill_lookup")
    for module in (common.requests, lookup) if lookup else (common.requests,):
        stack.enter_context(mock.patch.object(module, "get", asked))
    return stack


def prefix_match(l1, l2=0, l3=0):
    """A hit on decode: tokens on the device, in host memory and in storage."""
    if hicache is None:
        return torch.arange(l1), l1
    return hicache.DecodePrefixMatch(
        prefix_indices=torch.arange(l1),
        l2_host_hit_length=l2,
        l3_storage_hit_length=l3,
        last_device_node="locked",
        last_host_node="host",
    )


class DecodeEnd:
    """One request in front of SGLang's `pop_preallocated`, with room for it everywhere."""

    def __init__(self, prompt, match=None, manager=None, tree=OFF):
        self.manager = manager or decode_manager()
        self.receiver = Receiver(self.manager)
        req = Record(
            rid="long-prompt",
            bootstrap_room=ROOM,
            origin_input_ids=list(range(prompt)),
            output_ids=[],
            fill_ids=list(range(prompt)),
            finished_reason=None,
            req_pool_idx=0,
            kv=Record(req_pool_idx=0),
            sampling_params=SimpleNamespace(max_new_tokens=4),
            disagg_prefill_dp_rank=None,
            metadata_slot=None,
        )
        self.entry = Record(req=req, kv_receiver=self.receiver, waiting_for_input=True)
        allocator = Record(
            page_size=PAGE,
            available_size=lambda: 1 << 20,
            translate_kv_indices_for_transfer=lambda indices: indices,
        )
        scheduler = Record(
            server_args=Record(disaggregation_decode_enable_radix_cache=True, pp_size=1),
            running_batch=Record(reqs=[]),
            enable_decode_hicache=match is not None and hicache is not None,
            pool_stats_observer=Record(get_pool_stats=lambda: Record(full_token_usage=0.0)),
        )
        room = Record(
            available_size=lambda: 8, alloc=lambda: 3, lease=lambda owner: Record(index=3)
        )
        rows = Record(
            available_size=lambda: 8,
            req_to_token=torch.arange(4096, dtype=torch.int32).view(1, -1),
            mamba_allocator=None,
        )
        self.queue = instance(
            decode.DecodePreallocQueue,
            queue=[self.entry],
            pending_reqs=[],
            scheduler=scheduler,
            kv_manager=self.manager,
            tree_cache=tree,
            token_to_kv_pool=Record(page_size=PAGE),
            token_to_kv_pool_allocator=allocator,
            req_to_token_pool=rows,
            req_to_metadata_buffer_idx_allocator=room,
            transfer_queue=Record(queue=[]),
            num_reserved_decode_tokens=8,
            max_total_num_tokens=1 << 20,
            pp_size=1,
            _num_published_destinations=0,
            _match_prefix_and_lock=lambda req: match or prefix_match(0),
            _pre_alloc=lambda req, *_: torch.arange(prompt),
            _allocatable_tokens=lambda *_, **__: 1 << 20,
            _allocatable_token_budgets=lambda *_, **__: 1 << 20,
            _required_alloc_tokens=lambda **_: 1,
            _required_admission_tokens=lambda *_: 1,
            _rebootstrap_prefill_len=lambda req: prompt,
            _pre_alloc_fill_len=lambda req: prompt,
            _uses_swa_tail_prealloc=lambda: False,
            _hicache_pending_restore_tokens=lambda: 0,
            _prealloc_reservation_fits=lambda *_, **__: True,
        )

    def preallocate(self):
        settings = Record(
            disaggregation_decode_enable_radix_cache=True,
            disaggregation_decode_host_receive_threshold=1.0,
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(ends.settings_off())
            for name, value in (
                ("get_disagg", lambda: settings),
                ("ensure_mamba_capacity", lambda *_: True),
            ):
                if hasattr(decode, name):
                    stack.enter_context(mock.patch.object(decode, name, value))
            for name in ("_resolve_pending_reqs", "_update_handshake_waiters"):
                setattr(self.queue, name, lambda *_, **__: None)
            self.queue.pop_preallocated()
        return self

    @property
    def status(self):
        return int(self.receiver.poll())


class TestDecodePromises(unittest.TestCase):
    @unittest.skipUnless(HAS_PREFIX, "decode promises no prefix in this release")
    def test_whole_pages_are_promised_up_to_the_whole_prompt(self):
        for prefix in (0, PAGE, 4 * PAGE):
            with self.subTest(prefix=prefix):
                end = DecodeEnd(4 * PAGE, prefix_match(prefix)).preallocate()
                self.assertEqual(end.receiver.promised, [(4 - prefix // PAGE, prefix)])

    @unittest.skipIf(hicache is None, "this release floors the prefix where it is promised")
    def test_a_prefix_that_ends_inside_a_page_is_refused_by_name(self):
        for prefix in (1, PAGE + 1, 5 * PAGE):
            with self.subTest(prefix=prefix):
                with self.assertLogs(page_contract.logger, "ERROR") as logs:
                    end = DecodeEnd(4 * PAGE, prefix_match(prefix)).preallocate()
                self.assertEqual(end.receiver.promised, [])
                self.assertEqual(end.status, KVPoll.Failed)
                for word in ("long-prompt", f"{prefix} tokens", f"{PAGE} tokens"):
                    self.assertIn(word, logs.output[0])


class TestPrefillUses(unittest.TestCase):
    def finalized(self, prompt, prefix):
        """A request after its bootstrap, and its transfer, with this prefix from decode."""
        transfer = ends.Mooncake(pages=4)
        transfer.sender.pop_decode_prefix_len = lambda: prefix
        req = Record(
            rid="long-prompt",
            origin_input_ids=list(range(prompt)),
            disagg_kv_sender=transfer.sender,
            metadata_buffer_index=5,
            pending_bootstrap=True,
            start_send_idx=0,
        )
        queue = instance(
            prefill.PrefillBootstrapQueue,
            queue=[req],
            pp_size=1,
            kv_manager=transfer.manager,
            token_to_kv_pool=Record(page_size=PAGE),
            scheduler=Record(token_to_kv_pool_allocator=Record(page_size=PAGE)),
            req_to_metadata_buffer_idx_allocator=Record(available_size=lambda: 8, alloc=lambda: 5),
        )
        if hasattr(prefill.PrefillBootstrapQueue, "finalize_bootstrap"):
            queue.finalize_bootstrap(req)
        else:
            name = "poll_and_all_reduce_attn_cp_tp_group"
            with mock.patch.object(prefill, name, lambda *_: [KVPoll.WaitingForInput]):
                queue.pop_bootstrapped()
        return req, transfer

    @unittest.skipUnless(HAS_PREFIX, "decode promises no prefix in this release")
    def test_sending_begins_after_the_promised_pages(self):
        for prefix in (0, PAGE, 4 * PAGE):
            with self.subTest(prefix=prefix):
                req, transfer = self.finalized(4 * PAGE, prefix)
                self.assertEqual(req.start_send_idx, prefix)
                self.assertEqual(transfer.sender.num_kv_indices, 4 - prefix // PAGE)
                self.assertNotEqual(transfer.status, KVPoll.Failed)

    @unittest.skipUnless(HAS_PREFIX, "decode promises no prefix in this release")
    def test_a_promise_that_does_not_fit_the_prompt_fails_both_halves_by_name(self):
        for prefix in (1, PAGE - 1, PAGE + 1, 5 * PAGE, -PAGE):
            with self.subTest(prefix=prefix):
                with self.assertLogs(final_chunk.logger, "ERROR") as logs:
                    _, transfer = self.finalized(4 * PAGE, prefix)
                self.assertEqual(transfer.status, KVPoll.Failed)
                self.assertEqual(transfer.wire.statuses, [KVPoll.Failed])
                for word in ("long-prompt", f"{prefix} tokens", f"{PAGE} tokens"):
                    self.assertIn(word, logs.output[0])


class TestPageSizes(unittest.TestCase):
    def meet(self, page_size, **more):
        """Decode learns of a prefill server with this page size; returns decode's manager."""
        manager = decode_manager()
        if ASKS_ITS_MANAGER:
            info = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1}
            info |= {"page_size": page_size, "kv_cache_dtype": "auto"} | more
            info["follow_bootstrap_room"] = True
            asked = mock.Mock(return_value=Record(status_code=200, json=lambda: info))
            with ends.settings_off(), answering(asked):
                self.assertTrue(manager.try_ensure_parallel_info(PREFILL))
            self.assertIn(f"decode_page_size={PAGE}", str(asked.call_args_list))
            return manager
        info = {"prefill_attn_tp_size": 1, "prefill_dp_size": 1, "prefill_pp_size": 1}
        info["prefill_page_size"] = page_size
        for table in ("attn_tp_size", "dp_size", "pp_size", "page_size"):
            setattr(manager, f"prefill_{table}_table", {})
        vars(manager).update(
            attn_tp_size=1,
            pp_size=1,
            pp_rank=0,
            required_prefill_response_num_table={},
            connection_pool={f"{PREFILL}_0_0": ["connected"]},
        )
        manager.kv_args.engine_rank = 0
        asked = mock.Mock(return_value=Record(status_code=200, json=lambda: info))
        with answering(asked):
            common.CommonKVReceiver.__init__(Receiver(manager), manager, PREFILL, ROOM)
        self.assertIn(f"decode_page_size={PAGE}", str(asked.call_args_list))
        return manager

    def test_another_page_size_costs_the_request_and_not_the_server(self):
        with self.assertLogs(page_contract.logger, "ERROR") as logs:
            manager = self.meet(1)
            end = DecodeEnd(4 * PAGE, manager=manager).preallocate()
        self.assertEqual(end.receiver.promised, [])
        self.assertEqual(end.status, KVPoll.Failed)
        self.assertIn(PREFILL, logs.output[0])
        for size in ("=1,", f"={PAGE}."):
            self.assertIn(size, logs.output[-1])

    def test_the_same_page_size_is_served(self):
        manager = self.meet(PAGE)
        end = DecodeEnd(4 * PAGE, manager=manager).preallocate()
        self.assertEqual(end.receiver.promised, [(4, 0)])

    @unittest.skipUnless(ASKS_ITS_MANAGER, "this release compares page sizes alone")
    def test_other_differences_are_still_refused(self):
        try:
            manager = self.meet(PAGE, kv_cache_dtype="fp8_e5m2")
        except RuntimeError as error:
            reason = str(error)
        else:  # with pair-layout
            reason = manager.prefill_info_table[PREFILL].refusal
        self.assertIn("dtype", reason)

    def answer(self, page):
        """Prefill's bootstrap server is asked by a decode server with this page size."""
        server = instance(common.CommonKVBootstrapServer, page_size=PAGE)
        query = {} if page is None else {"decode_page_size": str(page)}
        asked = Record(query=query, remote="10.0.0.2")
        return asyncio.run(server._handle_route_get(asked))

    def test_prefill_names_a_decode_server_with_other_pages(self):
        with self.assertLogs(page_contract.logger, "ERROR") as logs:
            self.answer(1)
        for word in ("10.0.0.2", "page_size=1", f"page_size={PAGE}"):
            self.assertIn(word, logs.output[0])

    def test_prefill_has_nothing_to_say_of_its_own_size_or_of_none(self):
        with self.assertNoLogs(page_contract.logger, "ERROR"):
            self.answer(PAGE)
            self.answer(None)


@unittest.skipIf(hicache is None, "decode has no host tier in this release")
class TestRestore(unittest.TestCase):
    def test_storage_that_declines_is_not_promised(self):
        tree = Record(
            prefetch_from_storage=lambda *_, **__: None,
            ongoing_prefetch={},
            has_ongoing_prefetch=lambda handle: False,
        )
        match = prefix_match(PAGE, 0, 2 * PAGE)
        match.last_host_node = Record(parent=None)
        end = DecodeEnd(4 * PAGE, match, tree=tree).preallocate()
        self.assertEqual(end.receiver.promised, [(3, PAGE)])

    def test_storage_that_accepts_is_promised(self):
        handle = Record()
        tree = Record(
            prefetch_from_storage=lambda *_, **__: None,
            ongoing_prefetch={"long-prompt": 1},
            has_ongoing_prefetch=lambda handle: True,
        )
        match = prefix_match(PAGE, 0, 2 * PAGE)
        match.last_host_node = Record(parent=None)
        end = DecodeEnd(4 * PAGE, match, tree=tree)
        end.entry.req.cache_request_handle = handle
        self.assertEqual(end.preallocate().receiver.promised, [(1, 3 * PAGE)])

    def load_back(self, device, loaded, promised, stored=0):
        """SGLang's load-back of a promise when the tree now holds this much of the prompt.

        The last `stored` tokens of the promise were in storage when it was made.
        """
        keys = []

        def match_prefix(params):
            keys.append(len(params.key))
            hit = min(device, len(params.key))
            fields = {"last_device_node": "found", "last_host_node": "found"}
            fields |= {"best_match_node": "found", "host_hit_length": 0}
            fields |= {"device_indices": torch.arange(hit), "device_prefix_len": hit}
            return self.result(**fields)

        tree = Record(
            match_prefix=match_prefix,
            init_load_back=lambda params: (self.loaded(loaded), "restored"),
            path_device_indices=lambda node: torch.arange(device + loaded),
            check_prefetch_progress=lambda handle: True,
            inc_lock_ref=lambda node: Record(),
            lock=lambda node: Record(node=node),
            is_eagle=False,
            tree_core=Record(is_eagle=False),
            swa_reprefill_tail_tokens=lambda *_: 0,
            cache_controller=None,
            token_to_kv_pool_allocator=Record(page_size=PAGE),
        )
        req = Record(
            rid="long-prompt",
            origin_input_ids=page_ids(8 * PAGE),
            output_ids=page_ids(0),
            last_node="locked",
            extra_key=None,
            cache_salt=None,
            host_hit_length=0,
            prefix_len=0,
            _compute_max_prefix_len=lambda length: length,
            session=None,
            kv=Record(),
        )
        match = prefix_match(PAGE, promised - PAGE - stored, stored)
        entry = Record(req=req, prefix_match=match)
        queue = instance(decode.DecodeTransferQueue, tree_cache=tree)
        queue._try_hicache_queue_load_back(entry)
        return entry, keys

    @staticmethod
    def result(**fields):
        from sglang.srt.mem_cache.base_prefix_cache import MatchResult

        return MatchResult(**{k: v for k, v in fields.items() if k in MatchResult._fields})

    @staticmethod
    def loaded(tokens):
        from sglang.srt.mem_cache.base_prefix_cache import MatchResult

        lengths = "device_prefix_len" in MatchResult._fields
        return tokens if lengths else torch.arange(tokens)

    def test_no_more_than_the_promise_is_restored_when_the_hit_has_grown(self):
        entry, keys = self.load_back(device=6 * PAGE, loaded=0, promised=3 * PAGE)
        self.assertEqual(keys, [3 * PAGE])
        self.assertEqual(len(entry.hicache_restored_kv_indices), 2 * PAGE)

    def test_a_hit_that_shrank_fails_the_request_and_keeps_its_lock(self):
        for stored, loaded in itertools.product((0, PAGE, 2 * PAGE), (0, 1, PAGE)):
            with self.subTest(stored=stored, loaded=loaded):
                entry, _ = self.load_back(PAGE, loaded, promised=3 * PAGE, stored=stored)
                self.assertEqual(entry.hicache_restore_status, hicache.HiCacheRestoreResult.FAILED)
                self.assertEqual(entry.req.last_node, "locked")

    def test_storage_that_kept_its_word_is_restored_to_the_token(self):
        entry, keys = self.load_back(PAGE, 2 * PAGE, promised=3 * PAGE, stored=2 * PAGE)
        self.assertEqual(keys, [3 * PAGE])
        self.assertEqual(len(entry.hicache_restored_kv_indices), 2 * PAGE)


def page_ids(count):
    """Token ids as a prompt of the release has them."""
    from array import array

    from sglang.srt.managers import schedule_batch

    ids = range(count)
    return array("q", ids) if hasattr(schedule_batch, "array") else list(ids)


if __name__ == "__main__":
    unittest.main()
