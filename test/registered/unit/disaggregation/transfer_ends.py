# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode end of one transfer for tests: SGLang's own senders, managers and workers,
with a stand-in where the transport would be."""

import contextlib
import importlib
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import torch
from sglang.srt.disaggregation import prefill
from sglang.srt.disaggregation.base import conn as base
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.fake.conn import FakeKVSender
from sglang.srt.disaggregation.utils import DisaggregationMode

ROOM, AUX_ROW, PEER = 7, 5, "peer:9000"
KV, AUX, STATE = 1 << 20, 1 << 30, 1 << 34  # where each kind of memory begins, on both ends
PAGE_BYTES, PAGE = 64, 16
LISTS_PER_COMPONENT = hasattr(base, "StateType")  # from 0.5.12; one flat list before


class Stop(BaseException):
    """Ends a worker's loop; workers catch every `Exception`."""


class Off:
    """A feature that is off: false, empty, and whatever is asked of it is off, too."""

    def __bool__(self):
        return False

    def __call__(self, *args, **kwargs):
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


OFF = Off()


class Record(SimpleNamespace):
    """A record of which a test names the fields that matter; the others are off."""

    def __getattr__(self, name):
        if name.startswith("__") or "c4" in name:  # 0.5.17 asks whether there are such pools
            raise AttributeError(name)
        return OFF


def instance(cls, **fields):
    """An object of SGLang's class with these fields; features that they leave out are off."""
    bare = type(cls.__name__, (cls,), {"__getattr__": Record.__getattr__})
    made = bare.__new__(bare)
    vars(made).update(fields)
    return made


class Wire:
    """What the prefill end hands to the transport, and what reaches decode."""

    def __init__(self):
        self.writes = []  # (kind, bytes)
        self.notices = []  # NIXL's notifications
        self.statuses = []  # what decode is told about the room
        self.breaks = set()  # kinds of memory whose writes fail

    def write(self, addresses, sizes):
        kinds = {"kv" if a < AUX else "aux" if a < STATE else "state" for a in addresses}
        self.writes += [(kind, sum(sizes)) for kind in kinds]
        assert addresses and all(sizes), "a zero-length buffer reached the transport"
        return -1 if kinds & self.breaks else 0

    def count(self, kind):
        return sum(one == kind for one, _ in self.writes)


def settings_off():
    """The process-wide settings that later releases read: every one is off."""
    stack = contextlib.ExitStack()
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.srt.disaggregation."):
            for setting in ("get_parallel", "get_memory", "get_spec"):
                if setting in vars(module):
                    stack.enter_context(mock.patch.object(module, setting, OFF))
    return stack


class Queue(list):
    """A worker's queue: what was put, then the end of the loop."""

    put = list.append

    def get(self):
        if not self:
            raise Stop
        return self.pop(0)


def components(indices):
    """State indices as the release wants them; None when the model has no state."""
    if indices is None:
        return [] if LISTS_PER_COMPONENT else None
    return [np.array(indices, np.int32)] if LISTS_PER_COMPONENT else np.array(indices, np.int32)


def per_component(values):
    return [values] if LISTS_PER_COMPONENT else values


class Backend:
    """One request's transfer over one backend; subclasses know the backend's peers and workers."""

    name = ""
    sends_state = True

    def __init__(self, pages, state=None, cp_rank=None, cp_size=2):
        self.wire = Wire()
        self.pages, self.state = pages, state
        self.module = importlib.import_module(f"sglang.srt.disaggregation.{self.name}.conn")
        self.queue = Queue()
        self.manager = self.manage(state, cp_rank, cp_size)
        self.sender = self.send_with(self.manager)

    # the prefill end -------------------------------------------------------------------------

    def kv_args(self, state):
        has_state = state is not None
        return Record(
            kv_data_ptrs=[KV, KV + 4096],
            kv_item_lens=[PAGE_BYTES, PAGE_BYTES],
            aux_data_ptrs=[AUX],
            aux_item_lens=[8],
            state_data_ptrs=per_component([STATE, STATE + 4096]) if has_state else [],
            state_item_lens=per_component([PAGE_BYTES, PAGE_BYTES]) if has_state else [],
            state_dim_per_tensor=per_component([]) if has_state else [],
            state_layer_ids=per_component([]) if has_state else [],
            state_types=["swa"] if has_state else [],
            state_type="swa" if has_state else "none",
            kv_layer_ids=[],
            engine_rank=0,
            pp_rank=0,
            gpu_id=0,
            page_size=PAGE,
            kv_head_num=1,
            prefill_start_layer=0,
        )

    def manage(self, state, cp_rank, cp_size):
        server = Record()
        return instance(
            self.manager_class(),
            server_args=server,
            kv_args=self.kv_args(state),
            disaggregation_mode=DisaggregationMode.PREFILL,
            request_status={ROOM: KVPoll.WaitingForInput},
            transfer_infos={ROOM: {PEER: self.destination(state)}},
            decode_kv_args_table={PEER: self.registration(state)},
            req_to_decode_prefix_len={},
            failure_records={},
            exceptions={},
            failure_lock=OFF,
            session_lock=OFF,
            transfer_lock=OFF,
            session_failures=defaultdict(int),
            failed_sessions=set(),
            transfer_queues=[self.queue],
            _transfer_queues=[self.queue],
            _num_shards=1,
            _staging_outstanding=defaultdict(int),
            _deferred_ack_targets={},
            _deferred_ack_poisoned_rooms=set(),
            state_layout_rejections={},
            _state_layout_rejections={},
            _prepared_state_plans={},
            prep_handles={},
            deferred_bootstrap=None,
            attn_tp_size=1,
            attn_tp_rank=0,
            state_tp_size=1,
            pp_size=1,
            pp_rank=0,
            pp_group=SimpleNamespace(is_last_rank=True),
            attn_cp_size=cp_size,
            attn_cp_rank=cp_rank or 0,
            enable_all_cp_ranks_for_transfer=cp_rank is not None,
            transfer_source_rank=0,
            kv_shard_size=1,
            max_transfer_batch_indices=1 << 20,
            src_mem_kind="VRAM",
            engine=self.engine(),
            agent=self.engine(),
            aux_mem_descs=[AUX],
            kv_mem_descs=[KV, KV + 4096],
            state_mem_descs=per_component([STATE, STATE + 4096]) if state is not None else [],
            sync_status_to_decode_endpoint=self.told,
            send_kv_status_message=self.told_by_name,
            notify_decode_status=lambda infos, room, status, reason=None: self.tell(status),
        )

    def told(self, remote, dst_port, room, status, prefill_rank):
        self.tell(status)

    def told_by_name(self, *, targets, bootstrap_room, status, failure_reason=None):
        self.tell(status)

    def tell(self, status):
        self.wire.statuses.append(int(status))

    def destination(self, state):
        """What decode sent for the room: where pages, state and metadata go."""
        return Record(
            room=ROOM,
            endpoint="127.0.0.1",
            dst_port=9000,
            mooncake_session_id=PEER,
            agent_name=PEER,
            engine_key=PEER,
            dst_kv_indices=np.arange(100, 100 + self.pages, dtype=np.int32),
            dst_aux_index=2,
            dst_state_indices=[] if state is None else components(state),
            required_dst_info_num=1,
            dst_device_kv_indices=None,
            decode_prefix_len=0,
        )

    def registration(self, state):
        """What decode registered once: its memory."""
        has_state = state is not None
        return Record(
            dst_kv_ptrs=[KV, KV + 4096],
            dst_aux_ptrs=[AUX],
            dst_state_data_ptrs=per_component([STATE, STATE + 4096]) if has_state else [],
            dst_state_item_lens=per_component([PAGE_BYTES, PAGE_BYTES]) if has_state else [],
            dst_kv_mem_descs=[KV, KV + 4096],
            dst_aux_mem_descs=[AUX],
            dst_state_mem_descs=per_component([STATE, STATE + 4096]) if has_state else [],
            dst_kv_item_len=PAGE_BYTES,
            dst_attn_tp_size=1,
            decode_tp_size=1,
            decode_tp_rank=0,
            dst_tp_rank=0,
            gpu_id=0,
            dst_homogeneous_mem_kind="VRAM",
            kv_xfer_segments=None,
            dst_num_slots=None,
        )

    def send_with(self, manager):
        return instance(
            self.sender_class(),
            kv_mgr=manager,
            bootstrap_room=ROOM,
            aux_index=AUX_ROW,
            num_kv_indices=self.pages,
            curr_idx=0,
            chunk_id=0,
            conclude_state=None,
            pending_infos=None,
            xfer_handles=[],
            transfer_statuses=[],
            has_sent=False,
            failed=False,
            supports_host_tensor_indices=False,  # pinning needs a GPU
            _transfer_start_time=None,
            _transfer_num_kv_indices=0,
            _transfer_num_state_indices=0,
        )

    def chunk(self, pages, last=False, state=None):
        """What `send_kv_chunk` does with a chunk of so many pages."""
        if not self.sender.should_send_kv_chunk(pages, last):
            return
        first = self.sender.curr_idx
        indices = np.arange(first, first + pages, dtype=np.int32)
        with settings_off():
            self.sender.send(indices, components(state) if last else None)
            self.work()

    def work(self):
        """Run the backend's worker over what is queued."""

    # the outcome -----------------------------------------------------------------------------

    @property
    def status(self):
        with settings_off():
            return int(self.sender.poll())

    def decode_is_done(self):
        """Whether decode knows that everything has arrived."""
        return self.wire.statuses == [KVPoll.Success]


if not hasattr(base.BaseKVSender, "should_send_kv_chunk"):  # up to 0.5.10: prefill decides
    Backend.chunk_is_sent = staticmethod(lambda pages, last: pages > 0 or last)

    def _chunk(self, pages, last=False, state=None):
        self.sender.should_send_kv_chunk = self.chunk_is_sent
        return _chunk_of_later_releases(self, pages, last, state)

    _chunk_of_later_releases = Backend.chunk
    Backend.chunk = _chunk


class Mooncake(Backend):
    name = "mooncake"

    def manager_class(self):
        return self.module.MooncakeKVManager

    def sender_class(self):
        return self.module.MooncakeKVSender

    def engine(self):
        def batch_transfer_sync(session, sources, targets, sizes):
            return self.wire.write(targets, sizes)

        return Record(batch_transfer_sync=batch_transfer_sync)

    def work(self):
        with ThreadPoolExecutor(1) as executor, contextlib.suppress(Stop):
            self.manager.transfer_worker(self.queue, executor)


class Ascend(Mooncake):
    name = "ascend"

    def manager_class(self):
        return self.module.AscendKVManager

    def sender_class(self):
        return self.module.AscendKVSender


class Nixl(Backend):
    name = "nixl"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.handles = []
        self.receiving = None
        if hasattr(self.module, "TransferStatus"):  # up to 0.5.22 decode counts notifications
            self.receiving = instance(
                self.module.NixlKVManager,
                agent=SimpleNamespace(get_new_notifs=self.new_notices),
                transfer_statuses=defaultdict(self.module.TransferStatus),
                required_prefill_response_num_table={ROOM: 1},
            )
            receiver = instance(
                self.module.NixlKVReceiver,
                kv_mgr=self.receiving,
                bootstrap_room=ROOM,
                bootstrap_infos=[],
            )
            # Up to 0.5.9 a receiver learns its destinations when it is initialised.
            promise = getattr(self.module.NixlKVReceiver, "send_metadata", None) or receiver.init
            promise = promise.__get__(receiver) if promise is not receiver.init else promise
            promise(np.arange(self.pages, dtype=np.int32), AUX_ROW, components(self.state))

    def manager_class(self):
        return self.module.NixlKVManager

    def sender_class(self):
        return self.module.NixlKVSender

    def engine(self):
        return SimpleNamespace(
            get_xfer_descs=lambda requests, kind: np.asarray(requests, np.uint64),
            initialize_xfer=self.initialize,
            transfer=self.post,
            check_xfer_state=lambda handle: handle["state"],
            send_notif=lambda peer, notice, backend=None: self.wire.notices.append(notice),
            release_xfer_handle=lambda handle: None,
        )

    def initialize(self, operation, source, target, peer, notice=b""):
        return {"target": target, "notice": notice, "state": "PROC"}

    def post(self, handle, *more):
        rows = handle["target"]
        failed = self.wire.write([int(row[0]) for row in rows], [int(row[1]) for row in rows])
        handle["state"] = "ERR" if failed else "DONE"
        if not failed and handle["notice"]:
            self.wire.notices.append(handle["notice"])
        return "PROC"

    def new_notices(self):
        notices, self.wire.notices = self.wire.notices, []
        return {PEER: notices}

    def work(self):
        if hasattr(self.manager, "transfer_worker") and self.manager.transfer_worker is not OFF:
            with contextlib.suppress(Stop):
                self.manager.transfer_worker(self.queue)

    def decode_is_done(self):
        if self.receiving is None:
            return super().decode_is_done()
        self.receiving.update_transfer_status()
        return bool(self.receiving.check_transfer_done(ROOM))


class Mori(Backend):
    name = "mori"

    def __init__(self, *args, **kwargs):
        _stand_in_for_mori()
        super().__init__(*args, **kwargs)
        # Up to 0.5.12 it has no way to send the state of the releases' models.
        self.sends_state = hasattr(self.module, "_normalize_state_indices_per_component")

    def manager_class(self):
        return self.module.MoriKVManager

    def sender_class(self):
        return self.module.MoriKVSender

    def engine(self):
        def batch_write(sources, local, targets, remote, sizes, uids):
            statuses = []
            for target, sizes_of_one in zip(targets, sizes, strict=True):
                failed = self.wire.write([target] * len(sizes_of_one), sizes_of_one)
                statuses.append(_MoriStatus(failed))
            return statuses

        return Record(
            batch_write=batch_write,
            allocate_transfer_uid=lambda: 1,
            wait_all=lambda statuses, timeout_ms=0: (
                _StatusCode.FAILED if any(s.Failed() for s in statuses) else _StatusCode.SUCCESS
            ),
        )

    def manage(self, state, cp_rank, cp_size):
        manager = super().manage(state, cp_rank, cp_size)
        manager._transfer_timeout_ms = 0
        manager._wait_poll_ms = 1
        manager._room_status_notified = {}
        manager._send_aux_rdma = True
        manager.send_aux_tcp = self.send_aux_tcp
        return manager

    def send_aux_tcp(self, *args, **kwargs):
        self.wire.write([AUX], [8])
        return []

    def send_with(self, manager):
        sender = super().send_with(manager)
        sender._notified_status = None
        return sender

    def work(self):
        if self.queue:
            with contextlib.suppress(Stop):
                worker = getattr(self.module.MoriKVManager, "_transfer_worker", None)
                worker = worker or self.module.MoriKVManager.transfer_worker
                worker(self.manager, self.queue)

    def decode_is_done(self):
        self.status  # noqa: B018  up to 0.5.12 the sender's poll tells decode
        return super().decode_is_done()


class _StatusCode:
    SUCCESS, FAILED, IN_PROGRESS = 0, 1, 2


class _MoriStatus:
    def __init__(self, failed):
        self.failed = failed

    def InProgress(self):
        return False

    def Succeeded(self):
        return not self.failed

    def Failed(self):
        return bool(self.failed)

    def Message(self):
        return "broken"

    def Code(self):
        return _StatusCode.FAILED if self.failed else _StatusCode.SUCCESS


def _stand_in_for_mori():
    """Modules under the names of the MORI package, which is for AMD machines only."""
    if "mori" in sys.modules:
        return
    package, cpp, io = ModuleType("mori"), ModuleType("mori.cpp"), ModuleType("mori.io")
    package.__path__ = []
    cpp.TransferStatus = _MoriStatus
    io.StatusCode = _StatusCode
    for name in ("BackendType", "EngineDesc", "IOEngine", "IOEngineConfig", "MemoryDesc"):
        setattr(io, name, mock.MagicMock())
    for name in ("MemoryLocationType", "PollCqMode", "RdmaBackendConfig"):
        setattr(io, name, mock.MagicMock())
    sys.modules.update({"mori": package, "mori.cpp": cpp, "mori.io": io})


BACKENDS = (Mooncake, Ascend, Nixl, Mori)


# the scheduler of the prefill end --------------------------------------------------------------


def scheduler(page_size=PAGE, tokens=512):
    """What `send_kv_chunk` reads of a prefill scheduler."""
    allocator = Record(
        page_size=page_size,
        get_kvcache=lambda: object(),
        translate_kv_indices_for_transfer=lambda indices: indices,
    )
    return Record(
        token_to_kv_pool_allocator=allocator,
        req_to_token_pool=Record(req_to_token=torch.arange(tokens, dtype=torch.int32).view(1, -1)),
        disagg_metadata_buffers=mock.Mock(),
        disagg_prefill_bootstrap_queue=Record(kv_manager=Record(kv_args=Record(state_types=[]))),
        disagg_prefill_pending_chunk_rids=set(),
        server_args=Record(),
    )


def request(sender, prompt, start=0, end=None):
    """A request whose next chunk ends at token `end`; decode holds the first `start` tokens."""
    end = prompt if end is None else end
    return Record(
        rid="long-prompt",
        bootstrap_room=ROOM,
        origin_input_ids=list(range(prompt)),
        fill_ids=list(range(end)),
        fill_len=end,
        extend_end=end,
        extend_range=SimpleNamespace(start=0, end=end, length=end),
        start_send_idx=start,
        disagg_decode_prefix_len=start,
        req_pool_idx=0,
        kv=Record(req_pool_idx=0),
        disagg_kv_sender=sender,
    )


def send_kv_chunk(on, req, last):
    """SGLang's `send_kv_chunk` on a stand-in scheduler."""
    mixin = prefill.SchedulerDisaggregationPrefillMixin
    if hasattr(mixin, "_send_kv_chunk"):
        on._send_kv_chunk = lambda *args, **kwargs: mixin._send_kv_chunk(on, *args, **kwargs)
    on.kv_checksum_computer = None
    with settings_off():
        mixin.send_kv_chunk(on, req, last_chunk=last)


class Fake:
    """The sender of warm-up and health requests, with what reached it."""

    def __init__(self):
        self.sent = []
        self.sender = instance(
            FakeKVSender, has_sent=False, conclude_state=None, inited=True, waiting_since=None
        )
        send = self.sender.send
        self.sender.send = lambda pages, *more, **named: (
            self.sent.append(len(pages)),
            send(pages, *more, **named),
        )
        self.sender.get_max_transfer_tokens = lambda: None
