# SPDX-License-Identifier: Apache-2.0
"""A retracted request resumes with the draft KV and the draft state it had."""

import gc
import inspect
import logging
import unittest
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.managers import overlap_utils, schedule_batch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache import draft_pools, memory_pool
from sglang.srt.mem_cache import retraction_backup as draft_backup
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci

try:
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
except ImportError:  # 0.5.15 and later
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

try:
    from sglang.srt.mem_cache.common import RetractionBackup as HOST_POOL
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
except ImportError:  # before 0.5.18
    HOST_POOL = None

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

SLOTS = 64
TOKENS = 21  # of the request: the last one has no KV yet
HIDDEN, WIDTH = 8, 16  # of a metadata row


def setUpModule():
    """Stand-ins for the two CUDA calls that older releases make whatever the device."""
    for target in (
        mock.patch.object(torch.cuda, "synchronize", lambda *_: None),
        mock.patch.object(torch.Tensor, "record_stream", lambda *_: None),
    ):
        target.start()
        unittest.addModuleCleanup(target.stop)


def one_rank():
    """The parallel layout that later releases' latent pools ask for: everything on one rank."""
    layout = SimpleNamespace(attn_dcp_size=1, attn_dcp_rank=0)
    return mock.patch.object(memory_pool, "get_parallel", lambda: layout, create=True)


def mha_pool(layers=1, heads=2):
    pool = MHATokenToKVPool(
        size=SLOTS,
        page_size=1,
        dtype=torch.float32,
        head_num=heads,
        head_dim=4,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    for buffer in buffers(pool):
        buffer.copy_(torch.rand_like(buffer))
    return pool


def buffers(pool):
    return [*pool.k_buffer, *pool.v_buffer]


def rows(pool, slots):
    return [buffer[slots].clone() for buffer in buffers(pool)]


def allocator_for(target):
    return TokenToKVPoolAllocator(
        size=SLOTS, dtype=torch.float32, device="cpu", kvcache=target, need_sort=False
    )


def request(row=0):
    """A real request of TOKENS tokens that holds row `row`, with the names of every release."""
    req = Req.__new__(Req)
    req.rid = f"r{row}"
    req.origin_input_ids = list(range(TOKENS - 3))
    req.output_ids = list(range(3))
    req.to_finish = None
    req.skip_radix_cache_insert = False
    kv_info = getattr(schedule_batch, "ReqKvInfo", None)
    if kv_info is not None and hasattr(kv_info, "retraction_backup"):  # 0.5.19 and later
        req.kv = schedule_batch.ReqKvInfo()
        req.kv.req_pool_idx = row
    else:
        req.req_pool_idx = row
        req.mamba_pool_idx = None
        req.retraction_backup = None
    return req


class Server:
    """A decode scheduler's pools: target, drafts, slots; just what retraction touches."""

    def __init__(self, *drafts, target=None, overlap=False):
        self.target = mha_pool(layers=2) if target is None else target
        self.drafts = drafts
        self.allocator = allocator_for(self.target)
        self.req_to_token = ReqToTokenPool(
            size=4, max_context_len=SLOTS, device="cpu", enable_memory_saver=False
        )
        runners = [SimpleNamespace(token_to_kv_pool=pool) for pool in drafts]
        self.scheduler = SimpleNamespace(
            token_to_kv_pool_allocator=self.allocator,
            draft_worker=SimpleNamespace(_draft_model_runners=lambda: tuple(runners)),
            disaggregation_mode=SimpleNamespace(value="decode"),
            disagg_metadata_buffers=SimpleNamespace(
                output_topk_p=torch.zeros(4, WIDTH),
                output_topk_index=torch.zeros(4, WIDTH, dtype=torch.int64),
                output_hidden_states=torch.zeros(4, HIDDEN, dtype=torch.bfloat16),
            ),
            future_map=None,
            forward_stream=torch.get_device_module("cpu").current_stream(),
            result_queue=[],
            enable_overlap=overlap,
        )
        draft_backup.attach(self.scheduler)

    def admit(self, req, row=0):
        """Give the request a row and slots for its committed tokens."""
        slots = self.allocator.alloc(TOKENS - 1)
        self.req_to_token.req_to_token[row, : TOKENS - 1] = slots.to(torch.int32)
        return slots

    def retract(self, req, slots):
        """Back up, free, and let others write NaN over every row of every pool."""
        req.offload_kv_cache(self.req_to_token, self.allocator)
        self.allocator.free(slots)
        for pool in (self.target, *self.drafts):
            for buffer in buffers(pool):
                buffer.fill_(float("nan"))

    def resume(self, req):
        """New slots for the request, other than those it had, and its backup in them."""
        self.allocator.alloc(7)
        slots = self.admit(req)
        req.load_kv_cache(self.req_to_token, self.allocator)
        return slots


class DraftRows(unittest.TestCase):
    def roundtrip(self, server):
        req = request()
        slots = server.admit(req)
        before = [rows(pool, slots) for pool in (server.target, *server.drafts)]
        server.retract(req, slots)
        fresh = server.resume(req)
        self.assertNotEqual(slots.tolist(), fresh.tolist())
        return before, [rows(pool, fresh) for pool in (server.target, *server.drafts)]

    def assertSame(self, before, after):
        for pool, (was, now) in enumerate(zip(before, after, strict=True)):
            for a, b in zip(was, now, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, msg=f"pool {pool}")

    def test_draft_rows_come_back_with_the_targets(self):
        self.assertSame(*self.roundtrip(Server(mha_pool())))

    def test_every_pool_of_a_multi_layer_draft_comes_back(self):
        self.assertSame(*self.roundtrip(Server(mha_pool(), mha_pool(heads=3), mha_pool(layers=2))))

    def test_rows_in_long_chunks_come_back(self):
        server = Server(mha_pool())
        for pool in (server.target, *server.drafts):
            pool.cpu_offloading_chunk_size = 6  # 20 rows are not a multiple
        self.assertSame(*self.roundtrip(server))

    def test_without_a_draft_the_backup_is_upstreams(self):
        server = Server()
        before, after = self.roundtrip(server)
        self.assertSame(before, after)
        self.assertFalse(hasattr(server.allocator, "draft_side"))

    def test_dropping_the_backup_drops_the_draft_rows(self):
        """An abort while retracted clears the request's backup and nothing else."""
        server = Server(mha_pool())
        req = request()
        server.retract(req, server.admit(req))
        copy = req.kv_cache_cpu if hasattr(req, "kv_cache_cpu") else backup_of(req).cpu_tensors
        kept = [weakref.ref(tensor) for tensor in draft_backup._tensors(copy.draft)]
        self.assertTrue(kept)
        del copy
        if hasattr(req, "kv_cache_cpu"):
            del req.kv_cache_cpu
        else:
            holder(req).retraction_backup = None
        gc.collect()
        self.assertEqual([None] * len(kept), [ref() for ref in kept])

    def test_resuming_drops_the_backup(self):
        server = Server(mha_pool())
        req = request()
        server.retract(req, server.admit(req))
        server.resume(req)
        self.assertIsNone(getattr(req, "kv_cache_cpu", None))
        self.assertIsNone(backup_of(req))

    def test_bytes_of_the_backup_are_the_rows_bytes(self):
        server = Server(mha_pool())
        copy = draft_backup.get_cpu_copy(server.allocator, server.admit(request()))
        per_token = 2 * 2 * 4 * 4  # K and V, heads, head_dim, float32
        self.assertEqual((TOKENS - 1) * per_token, draft_backup.nbytes(copy.draft))
        self.assertEqual((TOKENS - 1) * per_token * 3, draft_backup.nbytes(copy))


def host_copies(*pools):
    """A cache controller whose host pool keeps the rows of `pools`, by plain indexing."""
    kept = []

    def move(operation):
        return operation.host_indices, operation.device_indices, None

    def keep(slots, **_):
        kept.extend(rows(pool, slots) for pool in pools)
        return mock.MagicMock()

    def bring_back(slots, **_):
        for pool, was in zip(pools, kept, strict=True):
            for buffer, values in zip(buffers(pool), was, strict=True):
                buffer[slots] = values
        return mock.MagicMock()

    copies = mock.MagicMock(
        _move_write_operation=move,
        _move_op_indices=move,
        _l2_transfers=lambda host, device, pools: device,
        _l2_load_transfers=lambda host, device, pools: device,
        allocate_host_transfers=lambda device, *_, **__: (torch.arange(len(device)), None),
        _resolve_pool_transfers_allocation=lambda *_, **__: None,
        _resolve_device_transfers=lambda *_, **__: None,
    )
    copies.l2_transfer_engine.submit_device_to_host = keep
    copies.l2_transfer_engine.submit_host_to_device = bring_back
    return copies


@unittest.skipUnless(HOST_POOL, "backups in a host pool from 0.5.18 on")
class OnATree(unittest.TestCase):
    """The release's own tree makes the backup in its host pool and restores it."""

    def test_every_layer_of_an_unpacked_draft_comes_back(self):
        """Its plan names the first layer's pool; the others' rows travel beside it."""
        pools = [mha_pool(), mha_pool(heads=3), mha_pool()]
        server = Server(*pools)
        server.scheduler.draft_worker.hicache_draft_plan = SimpleNamespace(device_pools=pools[:1])
        draft_backup.attach(server.scheduler)
        tree, target = UnifiedRadixCache.__new__(UnifiedRadixCache), server.target
        vars(tree).update(
            req_to_token_pool=server.req_to_token,
            token_to_kv_pool_allocator=server.allocator,
            page_size=1,
            tree_core=SimpleNamespace(page_size=1),  # where later releases have it
            cache_controller=host_copies(target, pools[0]),
            host_pool_group=mock.MagicMock(
                alloc=torch.arange, resolve_host_transfers=lambda *_, **__: None
            ),
            supports_swa=lambda: False,
            _build_sidecar_transfers=lambda *_, **__: [],
        )
        req = request()
        slots = server.admit(req)
        before = [rows(pool, slots) for pool in (target, *pools)]
        by_name = hasattr(tree, "backup_kv_cache")  # from 0.5.21
        backup = (tree.backup_kv_cache if by_name else tree.retraction_backup)(req)
        server.allocator.free(slots)
        for pool in (target, *pools):
            for buffer in buffers(pool):
                buffer.fill_(float("nan"))
        server.allocator.alloc(7)
        fresh = server.admit(req)
        (tree.restore_kv_cache if by_name else tree.retraction_restore)(req, backup)
        self.assertNotEqual(slots.tolist(), fresh.tolist())
        for pool, was in zip((target, *pools), before, strict=True):
            for a, b in zip(was, rows(pool, fresh), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
        tree.host_pool_group.free.assert_called_once()


@unittest.skipUnless(HOST_POOL, "backups in a host pool from 0.5.18 on")
class HostPool(unittest.TestCase):
    """Draft rows that the host pool has no place for travel with the backup that it makes."""

    def server(self, *drafts, kept):
        """A server whose host pool keeps the first `kept` draft pools, and its tree."""
        server = Server(*drafts)
        plan = SimpleNamespace(device_pools=drafts[:kept])
        server.scheduler.draft_worker.hicache_draft_plan = plan
        draft_backup.attach(server.scheduler)
        return server, SimpleNamespace(
            req_to_token_pool=server.req_to_token, token_to_kv_pool_allocator=server.allocator
        )

    def roundtrip(self, server, tree):
        """Back up, lose the pools, restore to other slots; the pools' rows before and after."""
        req, made = request(), HOST_POOL(host_indices="host slots")
        slots = server.admit(req)
        before = [rows(pool, slots) for pool in server.drafts]
        backup = draft_backup.keeps_unpooled_rows(lambda *_: made)(tree, req)
        server.allocator.free(slots)
        for pool in server.drafts:
            for buffer in buffers(pool):
                buffer.fill_(float("nan"))
        server.allocator.alloc(7)
        fresh = server.admit(req)
        restored = []
        draft_backup.restores_unpooled_rows(lambda *given: restored.append(given))(
            tree, req, backup
        )
        self.assertEqual([(tree, req, backup)], restored)
        return req, backup, before, [rows(pool, fresh) for pool in server.drafts]

    def test_further_layers_come_back(self):
        server, tree = self.server(mha_pool(), mha_pool(heads=3), mha_pool(), kept=1)
        _, backup, before, after = self.roundtrip(server, tree)
        self.assertEqual("host slots", backup.host_indices)
        self.assertTrue(torch.cat([x.flatten() for x in after[0]]).isnan().all())
        for was, now in zip(before[1:], after[1:], strict=True):
            for a, b in zip(was, now, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)

    def test_a_pool_that_keeps_all_is_left_to_itself(self):
        for kept in (0, 2):  # 0: no host pool at all
            server, tree = self.server(mha_pool(), mha_pool(), kept=kept)
            self.assertIsNone(self.roundtrip(server, tree)[1].cpu_tensors)

    def test_no_backup_stays_none(self):
        _, tree = self.server(mha_pool(), mha_pool(), kept=1)
        keeps = draft_backup.keeps_unpooled_rows(lambda *_: None)
        self.assertIsNone(keeps(tree, request()))

    def test_rows_that_could_not_be_kept_are_not_published(self):
        server, tree = self.server(mha_pool(), mha_pool(), kept=1)
        error = NotImplementedError()
        with (
            mock.patch.object(server.drafts[1], "get_cpu_copy", side_effect=error, autospec=True),
            self.assertLogs(draft_backup.logger, logging.WARNING),
        ):
            req, *_ = self.roundtrip(server, tree)
        self.assertTrue(req.skip_radix_cache_insert)

    def test_the_tree_does_both(self):
        names = ("backup_kv_cache", "restore_kv_cache")
        if not hasattr(UnifiedRadixCache, names[0]):  # to 0.5.20
            names = ("retraction_backup", "retraction_restore")
        for name in names:
            self.assertTrue(hasattr(getattr(UnifiedRadixCache, name), "__wrapped__"), name)


class Refused(unittest.TestCase):
    """A backup that cannot be held says so, and its rows reach no other request."""

    def refuse(self, error):
        draft = mha_pool()
        draft.get_cpu_copy = mock.Mock(side_effect=error)
        server = Server(draft)
        for _ in range(2):
            req = request()
            slots = server.admit(req)
            server.retract(req, slots)
            server.allocator.free(server.resume(req))
        return req

    def test_a_pool_that_cannot_be_copied_is_reported_once_and_not_published(self):
        with self.assertLogs(draft_backup.logger, logging.WARNING) as logs:
            req = self.refuse(NotImplementedError("fused"))
        self.assertEqual(1, len(logs.output), logs.output)
        self.assertIn("fused", logs.output[0])
        self.assertTrue(req.skip_radix_cache_insert)

    def test_no_host_memory_is_reported_once_and_not_published(self):
        error = RuntimeError("DefaultCPUAllocator: can't allocate memory")
        with self.assertLogs(draft_backup.logger, logging.WARNING) as logs:
            req = self.refuse(error)
        self.assertEqual(1, len(logs.output), logs.output)
        self.assertTrue(req.skip_radix_cache_insert)

    def test_any_other_error_is_raised(self):
        with self.assertRaisesRegex(RuntimeError, "illegal memory access"):
            self.refuse(RuntimeError("illegal memory access"))

    def test_a_restored_request_may_be_published(self):
        server = Server(mha_pool())
        req = request()
        server.retract(req, server.admit(req))
        server.resume(req)
        self.assertFalse(req.skip_radix_cache_insert)


def holder(req):
    return getattr(req, "kv", None) or req


def backup_of(req):
    return holder(req).retraction_backup


def draft_input(states, **fields):
    """Row i of the draft state holds `states[i]` everywhere."""
    column = torch.tensor(states, dtype=torch.float32)[:, None]
    known = inspect.signature(EagleDraftInput).parameters
    spec = EagleDraftInput(
        topk_p=column.repeat(1, 2) / 100,
        topk_index=column.repeat(1, 2).to(torch.int64),
        hidden_states=column.repeat(1, HIDDEN),
        **{name: value for name, value in fields.items() if name in known},
    )
    for name, value in fields.items():
        setattr(spec, name, value)
    return spec


class Relay:
    """The release's own FutureMap with rows of state; its gather kernel is plain indexing here."""

    def __init__(self, hidden=True):
        self.hidden = hidden  # False: a draft of several layers
        self.map = FutureMap.__new__(FutureMap)
        self.ring = hasattr(FutureMap, "resolve_future")  # 0.5.9 to 0.5.12
        vars(self.map).update(
            device="cpu",
            spec_algo=SpeculativeAlgorithm.EAGLE,
            need_topk=True,
            need_hidden_states=hidden,
            need_bonus_tokens=True,
            need_verified_id=False,
            draft_probs_buf=None,
            dsa_topk_indices_buf=None,
            topk_p_buf=torch.zeros(8, 2),
            topk_index_buf=torch.zeros(8, 2, dtype=torch.int64),
            hidden_states_buf=torch.zeros(8, HIDDEN) if hidden else None,
            output_tokens_buf=torch.zeros(8, dtype=torch.int64),
            verified_id_buf=torch.zeros(8, dtype=torch.int64),
            bonus_tokens_buf=torch.zeros(8, dtype=torch.int64),
            new_seq_lens_buf=torch.zeros(8, dtype=torch.int64),
        )

    def indices(self, slots):
        slots = torch.tensor(slots, dtype=torch.int64)
        return overlap_utils.FutureIndices(indices=slots) if self.ring else slots

    def store(self, slots, states):
        column = torch.tensor(states, dtype=torch.float32)[:, None]
        self.map.topk_p_buf[slots] = column / 100
        self.map.topk_index_buf[slots] = column.to(torch.int64)
        if self.hidden:
            self.map.hidden_states_buf[slots] = column

    def launch(self, batch, slots, results):
        """One step: gather what it drafts from, then relay `results`."""
        batch.spec_info = EagleDraftInput()
        batch.spec_info.future_indices = self.indices(slots)
        batch.spec_info.future_dsa_topk_indices_available = False
        resolve = FutureMap.resolve_future if self.ring else FutureMap._resolve_spec_extras
        with mock.patch.multiple(
            overlap_utils,
            create=True,
            spec_need_hidden_states=lambda: self.hidden,
            gather_spec_extras=lambda slots, *tables: tuple(
                None if table is None else table[slots] for table in tables
            ),
        ):
            resolve(self.map, batch)
        self.store(slots, results)
        batch.spec_info = EagleDraftInput()  # as run_batch leaves it: only where the result will be
        batch.spec_info.future_indices = self.indices(slots)


class DraftState(unittest.TestCase):
    """After retraction the request's fields hold the state that fits its committed tokens."""

    def setUp(self):
        self.server = Server(mha_pool())
        self.scheduler = self.server.scheduler

    def batch(self, reqs, overlap):
        batch = ScheduleBatch.__new__(ScheduleBatch)
        batch.reqs = list(reqs)
        batch.enable_overlap = overlap
        batch.device = "cpu"
        batch.token_to_kv_pool_allocator = self.server.allocator
        batch.req_to_token_pool = None
        batch.tree_cache = None
        batch.hisparse_coordinator = None
        batch.spec_info = None
        batch.forward_mode = SimpleNamespace(is_decode=lambda: True)
        return batch

    def release(self, batch, idx, backed_up=True):
        """`ScheduleBatch.release_req` with what frees KV taken out."""
        batch.reqs[idx].offload_kv_cache = lambda *_: None
        batch.reqs[idx].reset_for_retract = lambda: None
        inner = lambda *_, **__: backed_up  # noqa: E731
        names = ("release_req", "release_kv_cache", "evict_from_tree_cache")
        with mock.patch.multiple(schedule_batch, create=True, **dict.fromkeys(names, inner)):
            arguments = inspect.signature(ScheduleBatch.release_req).parameters
            args = [SimpleNamespace(disaggregation_mode="decode")] * ("server_args" in arguments)
            return batch.release_req(idx, len(batch.reqs) - 1, *args)

    def assertState(self, req, value, hidden=None):
        hidden = value if hidden is None else hidden
        self.assertEqual([value / 100] * 2, [round(p, 4) for p in req.output_topk_p[:2].tolist()])
        self.assertEqual([value] * 2, req.output_topk_index[:2].tolist())
        self.assertEqual([hidden] * HIDDEN, req.hidden_states_tensor.tolist())

    def test_a_draft_of_several_layers_keeps_no_hidden_row(self):
        """Its state is the tokens that it drafted for all steps; without them it loses a step."""
        reqs = [request(row) for row in range(2)]
        batch = self.batch(reqs, overlap=False)
        batch.spec_info = draft_input([11, 12])
        batch.spec_info.hidden_states = None
        self.release(batch, 1)
        self.assertState(reqs[1], 12, hidden=0)

    def test_with_overlap_a_draft_of_several_layers_is_undone_too(self):
        reqs, relay = [request(row) for row in range(2)], Relay(hidden=False)
        self.scheduler.future_map = relay.map
        relay.store([1, 2], [11, 12])
        batch = self.batch(reqs, overlap=True)
        relay.launch(batch, [1, 2], [21, 22])
        self.release(batch, 1)
        self.assertState(reqs[1], 22, hidden=0)
        self.scheduler.result_queue = [(batch, None)]
        self.release(batch, 0)
        self.assertState(reqs[0], 11, hidden=0)

    def test_without_overlap_the_batch_has_it(self):
        reqs = [request(row) for row in range(3)]
        batch = self.batch(reqs, overlap=False)
        batch.spec_info = draft_input([11, 12, 13])
        self.release(batch, 1)
        self.assertState(reqs[1], 12)

    def test_a_step_in_flight_is_undone(self):
        """Its result is thrown away with the retraction; what it started from fits the tokens."""
        reqs, relay = [request(row) for row in range(3)], Relay()
        self.scheduler.future_map = relay.map
        relay.store([1, 2, 3], [11, 12, 13])
        batch = self.batch(reqs, overlap=True)
        relay.launch(batch, [1, 2, 3], [21, 22, 23])
        self.scheduler.result_queue = [(batch, None)]
        for idx, value in ((2, 13), (0, 11)):
            self.release(batch, idx)
            self.assertState(reqs[idx], value)

    def test_a_processed_step_is_kept(self):
        reqs, relay = [request(row) for row in range(2)], Relay()
        self.scheduler.future_map = relay.map
        relay.store([1, 2], [11, 12])
        batch = self.batch(reqs, overlap=True)
        relay.launch(batch, [1, 2], [21, 22])
        self.release(batch, 1)
        self.assertState(reqs[1], 22)

    def test_a_request_merged_after_the_launch_has_its_relayed_state(self):
        """Older releases extend the launched batch's list of requests in place."""
        old, new, relay = request(0), request(1), Relay()
        self.scheduler.future_map = relay.map
        relay.store([1, 5], [11, 15])
        batch = self.batch([old], overlap=True)
        relay.launch(batch, [1], [21])
        self.scheduler.result_queue = [(batch, None)]
        batch.reqs.append(new)
        batch.spec_info.future_indices = relay.indices([1, 5])
        self.release(batch, 1)
        self.assertState(new, 15)
        self.release(batch, 0)
        self.assertState(old, 11)

    def test_the_saved_rows_look_like_metadata_rows(self):
        req = request()
        batch = self.batch([req], overlap=False)
        batch.spec_info = draft_input([7])
        self.release(batch, 0)
        rows = self.scheduler.disagg_metadata_buffers
        self.assertEqual(rows.output_topk_p[0].shape, req.output_topk_p.shape)
        self.assertEqual(rows.output_topk_index[0].shape, req.output_topk_index.shape)
        self.assertEqual(rows.output_hidden_states.dtype, req.hidden_states_tensor.dtype)
        self.assertFalse(req.output_topk_p[2:].any())

    def test_the_saved_state_shares_no_memory_with_the_batch(self):
        req = request()
        batch = self.batch([req], overlap=False)
        batch.spec_info = draft_input([7])
        self.release(batch, 0)
        batch.spec_info.hidden_states.fill_(float("nan"))
        self.assertState(req, 7)

    def test_nothing_is_saved_for_a_request_that_ends(self):
        aborted, lost = request(0), request(1)
        aborted.to_finish = object()
        batch = self.batch([aborted, lost], overlap=False)
        batch.spec_info = draft_input([7, 8])
        self.release(batch, 0)
        self.assertFalse(hasattr(aborted, "output_topk_p"))
        if hasattr(schedule_batch, "release_req"):  # its verdict is the method's from 0.5.19 on
            source = inspect.getsource(ScheduleBatch.release_req.__wrapped__)
            if "return release_req(" in source:
                self.assertIs(False, self.release(batch, 1, backed_up=False))
                self.assertFalse(hasattr(lost, "output_topk_p"))

    def test_an_unknown_state_leaves_the_fields_alone(self):
        req = request()
        req.output_topk_p = "prefill's"
        batch = self.batch([req], overlap=False)
        batch.spec_info = EagleDraftInput()
        self.release(batch, 0)
        self.assertEqual("prefill's", req.output_topk_p)

    def test_no_host_memory_for_the_state_leaves_the_fields_alone_and_says_so(self):
        req = request()
        req.output_topk_p = req.hidden_states_tensor = None
        batch = self.batch([req], overlap=False)
        batch.spec_info = draft_input([7])
        error = RuntimeError("DefaultCPUAllocator: can't allocate memory")
        full = mock.Mock(dtype=torch.bfloat16, device="cpu", shape=(4, HIDDEN))
        full.new_zeros.side_effect = error
        self.scheduler.disagg_metadata_buffers.output_hidden_states = full
        with self.assertLogs(draft_backup.logger, logging.WARNING) as logs:
            self.release(batch, 0)
        self.assertIn("neutral row", logs.output[0])
        self.assertIsNone(req.output_topk_p)
        self.assertIsNone(req.hidden_states_tensor)

    def test_other_roles_are_left_alone(self):
        req = request()
        batch = self.batch([req], overlap=False)
        batch.spec_info = draft_input([7])
        self.scheduler.disaggregation_mode = SimpleNamespace(value="null")
        self.release(batch, 0)
        self.assertFalse(hasattr(req, "output_topk_p"))


class Pools(unittest.TestCase):
    """Which pools are the draft's, by the attributes of each release's workers."""

    def pools(self, draft_worker, target="target"):
        allocator = SimpleNamespace(get_kvcache=lambda: target)
        return draft_pools.of(
            SimpleNamespace(token_to_kv_pool_allocator=allocator, draft_worker=draft_worker)
        )

    def runner(self, pool):
        return SimpleNamespace(token_to_kv_pool=pool)

    def test_none_without_a_draft(self):
        self.assertEqual((), self.pools(None))

    def test_none_where_the_draft_reads_the_targets_pool(self):
        """ngram workers name the target's runner, a frozen-KV draft shares its pool."""
        self.assertEqual((), self.pools(SimpleNamespace(model_runner=self.runner("target"))))

    def test_spec_v1_worker(self):
        worker = SimpleNamespace(model_runner=self.runner("a"), model_runner_list=[])
        self.assertEqual(("a",), self.pools(worker))

    def test_spec_v1_multi_layer_worker(self):
        runners = [self.runner("a"), self.runner("b")]
        worker = SimpleNamespace(model_runner=runners[0], model_runner_list=runners)
        self.assertEqual(("a", "b"), self.pools(worker))

    def test_spec_v2_worker(self):
        inner = SimpleNamespace(draft_runner=self.runner("a"))
        self.assertEqual(("a",), self.pools(SimpleNamespace(draft_worker=inner)))

    def test_spec_v2_multi_layer_worker(self):
        runners = [self.runner("a"), self.runner("b"), self.runner("b")]
        inner = SimpleNamespace(draft_runner=runners[0], draft_runner_list=runners)
        self.assertEqual(("a", "b"), self.pools(SimpleNamespace(draft_worker=inner)))

    def test_latent_draft_rows_come_back(self):
        """An MLA draft (NextN) keeps one latent row a token."""
        with one_rank():
            draft = MLATokenToKVPool(
                size=SLOTS,
                page_size=1,
                dtype=torch.float32,
                kv_lora_rank=8,
                qk_rope_head_dim=4,
                layer_num=1,
                device="cpu",
                enable_memory_saver=False,
            )
            draft.kv_buffer[0].copy_(torch.rand_like(draft.kv_buffer[0]))
            server = Server(draft)
            req = request()
            slots = server.admit(req)
            before = draft.kv_buffer[0][slots].clone()
            req.offload_kv_cache(server.req_to_token, server.allocator)
            server.allocator.free(slots)
            draft.kv_buffer[0].fill_(float("nan"))
            after = draft.kv_buffer[0][server.resume(req)]
        torch.testing.assert_close(before, after, rtol=0, atol=0)


if __name__ == "__main__":
    unittest.main()
