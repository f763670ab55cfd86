# SPDX-License-Identifier: Apache-2.0
"""A decode server's queues, pools, batches and scheduler steps for tests: SGLang's own, on the CPU,
with stand-ins where a peer, a model or a client would be."""

import contextlib
import inspect
from array import array
from collections import deque
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.disaggregation import decode, metadata_slots
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import DisaggregationMode, MetadataBuffers
from sglang.srt.managers import schedule_batch
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache import common as mem_cache_common
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

try:  # 0.5.13 and later
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor as ResultProcessor,
    )
except ImportError:
    ResultProcessor = Scheduler
try:  # up to 0.5.21; afterwards a disabled radix cache does the same
    from sglang.srt.mem_cache.chunk_cache import ChunkCache as PlainCache
except ImportError:
    from sglang.srt.mem_cache.radix_cache import RadixCache as PlainCache
try:
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
except ImportError:
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

VOCAB = 1000
PROMPT = 5
TOKEN = 7  # what prefill and every decode step produce

SERVER_ARGS = {
    "device": "cpu",
    "disaggregation_decode_retraction_backup": "cpu_tensor",
    "disaggregation_mode": "decode",
    "num_reserved_decode_tokens": 2,
    "page_size": 1,
    "speculative_algorithm": "EAGLE",
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 4,
    "speculative_num_steps": 3,
}
# What a scheduler has for features that these tests leave off ...
FLAGS = (
    "_engine_paused",
    "enable_continuous_input_polling",
    "enable_decode_hicache",
    "enable_fpm",
    "enable_hicache_storage",
    "enable_hisparse",
    "enable_lora",
    "enable_metrics",
    "enable_overlap",
    "enable_overlap_mlx",
    "enable_priority_scheduling",
    "enable_unified_memory",
)
# ... for what they do not use ...
ABSENT = (
    "chunked_req",
    "cur_batch",
    "dllm_config",
    "hisparse_coordinator",
    "kv_checksum_computer",
    "last_batch",
    "mm_receiver",
    "sliding_window_size",
)
# ... and for parts that they do not look at.
PARTS = (
    "beam_coordinator",
    "dp_attn_adapter",
    "future_map",
    "grammar_manager",
    "ipc_channels",
    "load_inquirer",
    "load_publisher",
    "metrics_collector",
    "metrics_reporter",
    "model_config",
    "ngram_embedding_manager",
    "output_streamer",
    "policy",
    "pool_stats_observer",
    "scheduler_stage_metrics",
    "send_to_tokenizer",
    "tp_worker",
)
# Scheduler methods that reach out to a client or to metrics.
SILENT = (
    "_maybe_clear_mm_inputs",
    "_record_step_counters",
    "log_batch_result_stats",
    "maybe_send_health_check_signal",
    "publish_load_snapshot",
    "send_abort_output",
    "stream_output",
    "update_device_timer",
)


class KVCache:
    """The target's KV pool as far as the queues look at it; a copy of rows is a note of them."""

    cpu_copy_carries_mamba = False

    def get_cpu_copy(self, indices, *_args, **_kwargs):
        return indices.clone()

    def load_cpu_copy(self, kv_cache_cpu, indices, *_args, **_kwargs):
        assert len(kv_cache_cpu) == len(indices)


class Receiver:
    """A KV receiver whose peer is the test."""

    abort_notified = False
    bootstrap_infos = ()
    conclude_state = None
    require_staging = False
    supports_host_destination = False

    def __init__(self, manager):
        self.kv_mgr = manager
        self.state = KVPoll.WaitingForInput
        self.sent_row = None

    def poll(self):
        return self.state

    def send_metadata(self, _pages, aux_index=None, *_args, **_kwargs):
        self.sent_row = aux_index
        self.move_to(KVPoll.Transferring)

    init = send_metadata  # its name in 0.5.9

    def move_to(self, state):
        """What failed once stays failed."""
        if self.state != KVPoll.Failed:
            self.state = state

    def abort(self):
        self.state = KVPoll.Failed
        self.abort_notified = self.kv_mgr.enable_deferred_decode_kv_release

    def ensure_abort_notified(self, **_):
        self.abort_notified = self.kv_mgr.enable_deferred_decode_kv_release

    def failure_exception(self):
        raise RuntimeError("the transfer failed")

    def clear(self):
        pass


class TransferManager:
    """A KV manager with nothing to connect to; it knows which aborted rooms have drained."""

    def __init__(self):
        self.enable_deferred_decode_kv_release = False
        self.kv_args = SimpleNamespace(state_types=[])
        self.drained = set()

    def register_deferred_abort_room(self, _room):
        pass

    def is_abort_release_safe(self, room, _required_acks):
        return room in self.drained

    def clear_deferred_abort_state(self, room):
        self.drained.discard(room)


class ModellessScheduler(Scheduler):
    """A scheduler whose queues and steps are SGLang's; only the forward pass is left out."""

    draft_worker = None

    def update_running_batch(self, batch):
        batch.filter_batch()
        batch.forward_mode = ForwardMode.DECODE
        return batch

    def maybe_prepare_mlp_sync_batch(self, batch):
        return batch


for _name in SILENT:
    setattr(ModellessScheduler, _name, lambda self, *args, **kwargs: None)


class DecodeSide:
    """One decode server; methods for what the world does, what it does, and what is seen."""

    def __init__(self, size=4, pre_alloc=4, hidden=8, slots=None, dsa=0, spec="EAGLE"):
        self._patches = contextlib.ExitStack()
        parallel = one_rank()
        for module in (decode, schedule_batch, scheduler_module):
            if hasattr(module, "get_parallel"):
                self._patch(module, "get_parallel", lambda: parallel)
        self.now = 0.0
        self.accepted = 1  # tokens that one step gives each request
        self._patch(metadata_slots, "time", SimpleNamespace(monotonic=lambda: self.now))
        if hasattr(decode, "time"):
            self._patch(decode.time, "monotonic", lambda: self.now)
        self.server_args = publish_server_args(self._patches)

        self.rows = decode.DecodeReqToTokenPool(size, 64, "cpu", False, pre_alloc)
        self.kv = TokenToKVPoolAllocator(4096, torch.float32, "cpu", KVCache(), False)
        self.tree = PlainCache(CacheInitParams(True, self.rows, self.kv, 1))
        self.processor = SimpleNamespace(
            disaggregation_mode=DisaggregationMode.DECODE,
            server_args=self.server_args,
            enable_hisparse=False,
            token_to_kv_pool_allocator=self.kv,
            tree_cache=self.tree,
            output_streamer=mock.MagicMock(),
            stream_output=mock.MagicMock(),
        )
        self.hidden, self.dsa = hidden, dsa
        self.manager = TransferManager()
        self.scheduler = self._scheduler(size, SpeculativeAlgorithm.from_string(spec))
        self.take_role(slots)

    def close(self):
        self._patches.close()

    def take_role(self, slots=None):
        """Build what a server builds when it becomes a decode server; `slots` rows, else enough."""
        self.slots = metadata_slots.SlotPool(slots or metadata_slots.pool_size(self.rows, 2))
        optional = {"output_dsa_topk_indices_dim": self.dsa, "max_sampling_mask_tokens": 16}
        known = inspect.signature(MetadataBuffers.__init__).parameters
        more = {name: value for name, value in optional.items() if name in known}
        self.buffers = MetadataBuffers(self.slots.size, self.hidden, torch.bfloat16, **more)
        self.scheduler.req_to_metadata_buffer_idx_allocator = self.slots
        self.scheduler.disagg_metadata_buffers = self.buffers
        self.transfer = self._queue(decode.DecodeTransferQueue)
        self.scheduler.disagg_decode_transfer_queue = self.transfer
        self.prealloc = self._queue(decode.DecodePreallocQueue)
        self.scheduler.disagg_decode_prealloc_queue = self.prealloc

    # What the world does.

    def arrive(self, rid, room, max_new_tokens=4):
        """A request whose handshake is over waits for a request row and KV."""
        ids = inspect.signature(Req.__init__).parameters["origin_input_ids"].annotation
        prompt = array("q", range(PROMPT)) if "array" in str(ids) else list(range(PROMPT))
        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
        sampling.normalize(None)
        address = {"bootstrap_host": "127.0.0.1", "bootstrap_room": room}
        req = Req(rid, "", prompt, sampling, vocab_size=VOCAB, **address)
        self.receive(req)
        return req

    def receive(self, req):
        """Start a transfer for `req`, its first or one after a retraction without backup."""
        entry = decode.DecodeRequest(req=req, kv_receiver=Receiver(self.manager))
        entry.waiting_for_input = True
        self.prealloc.queue.append(entry)

    def write(self, row, room, value, seed=False):
        """Metadata of `room` lands in a row; every draft field holds `value`."""
        self.buffers.output_ids[row, 0] = TOKEN
        self.buffers.output_topk_p[row] = value
        self.buffers.output_topk_index[row] = value
        self.buffers.output_hidden_states[row] = value
        if seed:
            self.buffers.output_dsa_topk_indices[row] = value
        self.buffers.bootstrap_room[row, 0] = room

    def arrived(self, rid, value=1, seed=False):
        """The transfer of `rid` is over: its row is written, its KV is there."""
        entry = self.entry(rid)
        self.write(entry.metadata_buffer_index, entry.req.bootstrap_room, value, seed)
        self.kv_arrived(rid)

    def kv_arrived(self, rid):
        """The KV of `rid` is there; its row may not be."""
        self.entry(rid).kv_receiver.move_to(KVPoll.Success)

    def fail(self, rid):
        """The transfer of `rid` breaks."""
        self.entry(rid).kv_receiver.move_to(KVPoll.Failed)

    def abort(self, rid):
        """The client gives up."""
        self.scheduler.abort_request(AbortReq(rid=rid))

    # What the server does.

    def poll(self):
        """One pass over the queues: resume, admit, commit."""
        self.scheduler.process_decode_queue()

    def schedule(self):
        """Turn waiting requests into a prebuilt batch, merge it and say what runs next."""
        step = self.scheduler.get_next_disagg_decode_batch_to_run
        if "running_batch" in inspect.signature(step).parameters:  # 0.5.16 and later
            plan = step(self.scheduler.running_batch)
            self.scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        else:
            batch = step()
        self.scheduler.last_batch = batch
        return batch

    def result(self, batch):
        """The forward of `batch` is over."""
        self.scheduler.process_batch_result(batch, SimpleNamespace())

    def turn(self):
        """One turn of the event loop without overlap."""
        self.poll()
        batch = self.schedule()
        if batch:
            self.result(batch)
        return batch

    def turns(self, n=12):
        """Enough turns for everything that can finish to finish."""
        for _ in range(n):
            self.turn()

    def prebuild(self):
        """Schedule once; the prebuilt batch of what was waiting, as it was built."""
        built = []
        process = ScheduleBatch.process_prebuilt

        def noted(batch, *args, **kwargs):
            process(batch, *args, **kwargs)
            built.append(SimpleNamespace(reqs=list(batch.reqs), spec_info=batch.spec_info))

        with mock.patch.object(ScheduleBatch, "process_prebuilt", noted):
            batch = self.schedule()
        self.unprocessed = batch
        return built[0] if built else None

    def first_result(self):
        """Process what `prebuild` scheduled, up to the first result of a real forward."""
        batch = self.unprocessed
        self.result(batch)
        if batch.forward_mode.is_prebuilt():  # 0.5.9 spends a turn on the prebuilt batch itself
            self.result(self.schedule())

    def retract(self, req, backup=True):
        """KV pressure takes `req` out of the running batch; without backup it is received anew."""
        batch = self.scheduler.running_batch
        if hasattr(schedule_batch, "release_req"):
            given = {
                "req": req,
                "remaing_req_count": 1,
                "server_args": self.server_args,
                "req_to_token_pool": self.rows,
                "token_to_kv_pool_allocator": self.kv,
                "tree_cache": self.tree,
                "hisparse_coordinator": None,
                "offload_kv": backup,
            }
            wanted = inspect.signature(schedule_batch.release_req).parameters
            schedule_batch.release_req(**{name: given[name] for name in wanted})
        else:  # up to 0.5.12
            batch.release_req(batch.reqs.index(req), 1, self.server_args)
        batch.filter_batch(keep_indices=[i for i, r in enumerate(batch.reqs) if r is not req])
        if backup:
            self.prealloc.retracted_queue.append(req)
        else:
            self.receive(req)

    # What is seen.

    def entry(self, rid):
        return next(e for e in self.transfer.queue + self.prealloc.queue if e.req.rid == rid)

    def waiting(self):
        return [req.rid for req in self.scheduler.waiting_queue]

    def running(self):
        return [req.rid for req in self.scheduler.running_batch.reqs]

    def status(self, req):
        slot = getattr(req, "metadata_slot", None)
        return None if slot is None else slot.status

    def check_all_free(self):
        """Raise AssertionError when a request row, KV or a metadata row is still somebody's."""
        self.slots.check_integrity()
        assert not self.slots.held(), f"held: {[slot.owner for slot in self.slots.held()]}"
        rows = self.rows.size + self.rows.pre_alloc_size
        assert self.rows.available_size() == rows, f"{self.rows.available_size()} of {rows} rows"
        kv = self.kv.available_size()
        assert kv == self.kv.size, f"{kv} of {self.kv.size} KV slots"

    # How it is built.

    def _patch(self, target, name, value):
        self._patches.enter_context(mock.patch.object(target, name, value))

    def _scheduler(self, size, spec_algorithm):
        scheduler = ModellessScheduler.__new__(ModellessScheduler)
        parts = {name: mock.MagicMock() for name in PARTS}
        parts["dp_attn_adapter"].maybe_prepare_mlp_sync_batch = lambda batch: batch
        parts["grammar_manager"].has_waiting_grammars.return_value = False
        parts["pool_stats_observer"].get_pool_stats().full_token_usage = 0.0
        parts["tp_worker"].is_hybrid_swa = False
        parts["model_config"].vocab_size = VOCAB
        parts["model_config"].is_encoder_decoder = False
        vars(scheduler).update(
            dict.fromkeys(FLAGS, False) | dict.fromkeys(ABSENT) | parts,
            batch_result_processor=SimpleNamespace(
                process_batch_result_prebuilt=self._prebuilt_result,
                process_batch_result_decode=self._decode_result,
                _maybe_update_reasoning_tokens=lambda *_: None,
            ),
            disaggregation_mode=DisaggregationMode.DECODE,
            max_running_requests=size,
            max_total_num_tokens=self.kv.size,
            polling_count=0,
            polling_interval=1,
            process_batch_result_decode=self._decode_result,
            process_batch_result_prebuilt=self._prebuilt_result,
            ps=SimpleNamespace(pp_size=1),
            random_seed=0,
            req_to_token_pool=self.rows,
            result_queue=deque(),
            running_batch=ScheduleBatch(reqs=[], batch_is_full=False),
            server_args=self.server_args,
            spec_algorithm=spec_algorithm,
            token_to_kv_pool_allocator=self.kv,
            tree_cache=self.tree,
            waiting_queue=[],
        )
        return scheduler

    def _queue(self, kind):
        """One of SGLang's queues, by its own constructor, with what the release wants."""
        given = {
            "gloo_group": one_rank_group(),
            "max_total_num_tokens": self.kv.size,
            "metadata_buffers": self.buffers,
            "num_reserved_decode_tokens": 2,
            "pp_rank": 0,
            "req_to_metadata_buffer_idx_allocator": self.slots,
            "req_to_token_pool": self.rows,
            "scheduler": self.scheduler,
            "token_to_kv_pool_allocator": self.kv,
            "tp_rank": 0,
            "transfer_queue": getattr(self, "transfer", None),
            "tree_cache": self.tree,
        }
        wanted = list(inspect.signature(kind).parameters)
        with mock.patch.object(
            decode.DecodePreallocQueue, "_init_kv_manager", lambda _: self.manager
        ):
            return kind(**{name: given.get(name) for name in wanted})

    def _prebuilt_result(self, batch):
        ResultProcessor.process_batch_result_prebuilt(self.processor, batch)

    def _decode_result(self, batch, _result):
        """What follows a forward pass: more tokens for everyone, and an end for some."""
        for req in batch.reqs:
            if req.finished():
                continue
            req.output_ids.extend([TOKEN] * self.accepted)
            req.spec_verify_ct += 1
            (getattr(req, "update_finish_state", None) or req.check_finished)()
            if req.finished():
                release_kv_cache(req, self.tree, insert=True)


def release_kv_cache(req, tree, insert):
    """SGLang's own, under the name the release has for its flag."""
    known = inspect.signature(mem_cache_common.release_kv_cache).parameters
    flag = "checkpoint" if "checkpoint" in known else "is_insert"
    mem_cache_common.release_kv_cache(req, tree, **{flag: insert})


def one_rank_group():
    """The group of this process alone, set up once."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return torch.distributed.group.WORLD


def one_rank():
    """What `get_parallel()` says on a single rank."""
    sizes = {f"{name}_size": 1 for name in ("tp", "pp", "dp", "attn_tp", "attn_cp", "attn_dp")}
    ranks = {name.replace("_size", "_rank"): 0 for name in sizes}
    group = SimpleNamespace(cpu_group=one_rank_group())
    return SimpleNamespace(**sizes, **ranks, attn_tp_group=group, enable_dp_attention=False)


def publish_server_args(stack):
    """Make a decode server's arguments the process's, in whatever way the release has for it."""
    known = inspect.signature(ServerArgs).parameters
    fields = {name: value for name, value in SERVER_ARGS.items() if name in known}
    try:
        from sglang.srt.runtime_context import get_context

        override = get_context().override_server_args(**fields)
    except (ImportError, AttributeError):  # before 0.5.16
        server_args = ServerArgs(model_path="dummy")
        vars(server_args).update(fields)
        set_global_server_args_for_scheduler(server_args)
        return server_args
    return stack.enter_context(override)
