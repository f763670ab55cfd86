# SPDX-License-Identifier: Apache-2.0
"""One scheduler pass over a long queue on SGLang's real classes: nothing new, and one status set.

bench/queue_pass.py --patched build/0.5.23/python [--stock PATH] [--json FILE]
"""

from __future__ import annotations

import itertools
import sys
import threading
from types import SimpleNamespace
from typing import Any

from frame import Bench, microseconds, run

QUEUED = (64, 256, 1024, 4096)
# "ready": prefill is ready, decode has no row. All others wait for their peer.
QUEUES = ("handshake", "ready", "transfer", "bootstrap")
# Long enough for the full looks, one in 0.25 s, to weigh what they weigh.
SECONDS_PER_TURN = 0.3
CEILING = 0.25


class Queue:
    """One of SGLang's queues with `queued` requests to which nothing happens."""

    def __init__(self, queue: str, queued: int) -> None:
        import torch
        from sglang.srt.disaggregation.base import KVPoll
        from sglang.srt.disaggregation.common import conn

        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.group = torch.distributed.group.WORLD
        self.patched = hasattr(conn.CommonKVManager.update_status, "__wrapped__")
        self.state = {
            "handshake": KVPoll.Bootstrapping,
            "bootstrap": KVPoll.Bootstrapping,
            "ready": KVPoll.WaitingForInput,
            "transfer": KVPoll.Transferring,
        }[queue]
        self.manager = conn.CommonKVManager.__new__(conn.CommonKVManager)
        vars(self.manager).update(
            request_status=dict.fromkeys(range(1, queued + 1), self.state),
            deferred_bootstrap=None,
            defer_decode_allocation=False,
            bootstrap_timeout=1e9,
            waiting_timeout=1e9,
            _staging_outstanding={},
        )
        self.rooms = itertools.cycle(range(1, queued + 1))
        end = conn.CommonKVSender if queue == "bootstrap" else conn.CommonKVReceiver
        peers = [self._peer(end, room) for room in range(1, queued + 1)]
        if queue == "bootstrap":
            self.step = self._bootstrap(peers)
        elif queue == "transfer":
            self.step = self._transfer(peers)
        else:
            self.step = self._prealloc(peers)

    def turn(self) -> dict[str, float]:
        return {
            "nothing new": microseconds(self.step, SECONDS_PER_TURN),
            "one status set": microseconds(self._step_with_news, SECONDS_PER_TURN),
        }

    def _step_with_news(self) -> None:
        self.manager.update_status(next(self.rooms), self.state)
        self.step()

    def _peer(self, end: type, room: int) -> Any:
        peer = end.__new__(end)
        vars(peer).update(
            bootstrap_room=room,
            kv_mgr=self.manager,
            conclude_state=None,
            init_time=None,
            _prefill_wait_start=None,
            _lifecycle_lock=threading.RLock(),
            require_staging=False,
        )
        if self.patched:
            from sglang.srt.disaggregation import room_tables

            room_tables.own(self.manager, peer)
        return peer

    def _entries(self, peers: list[Any]) -> list[Any]:
        from sglang.srt.disaggregation import decode

        stats = SimpleNamespace(set_bootstrap_done_time=lambda: None)
        return [
            decode.DecodeRequest(
                req=SimpleNamespace(
                    rid=str(peer.bootstrap_room), finished_reason=None, time_stats=stats
                ),
                kv_receiver=peer,
                metadata_buffer_index=0,
            )
            for peer in peers
        ]

    def _scheduler(self) -> Any:
        return SimpleNamespace(
            attn_cp_cpu_group=self.group,
            attn_tp_cpu_group=self.group,
            enable_decode_hicache=False,
            enable_hisparse=False,
            enable_lora=False,
            enable_priority_scheduling=False,
            running_batch=SimpleNamespace(reqs=[]),
            server_args=SimpleNamespace(pp_size=1, enable_priority_scheduling=False),
        )

    def _prealloc(self, peers: list[Any]) -> Any:
        from sglang.srt.disaggregation import decode

        queue = decode.DecodePreallocQueue.__new__(decode.DecodePreallocQueue)
        none_left = SimpleNamespace(available_size=lambda: 0)
        vars(queue).update(
            gloo_group=self.group,
            kv_manager=self.manager,
            pending_reqs=[],
            pp_size=1,
            queue=self._entries(peers),
            req_to_metadata_buffer_idx_allocator=none_left,
            req_to_token_pool=none_left,
            retracted_queue=[],
            scheduler=self._scheduler(),
            tp_rank=0,
            # What the budgets of a real pool cost does not depend on the queue.
            _allocatable_token_budgets=lambda **_: 0,
            _hicache_pending_restore_tokens=lambda: 0,
            _prefill_dp_rank_queries={},
            _uses_swa_reservation=lambda: False,
            _uses_swa_tail_prealloc=lambda: False,
        )
        return queue.pop_preallocated

    def _transfer(self, peers: list[Any]) -> Any:
        from sglang.srt.disaggregation import decode

        queue = decode.DecodeTransferQueue.__new__(decode.DecodeTransferQueue)
        vars(queue).update(
            enable_deferred_kv_release=False,
            enable_host_receive=False,
            enable_staging=False,
            gloo_group=self.group,
            metadata_buffers=SimpleNamespace(),
            queue=self._entries(peers),
            scheduler=self._scheduler(),
            tp_rank=0,
        )
        return queue.pop_transferred

    def _bootstrap(self, peers: list[Any]) -> Any:
        from sglang.srt.disaggregation import prefill

        queue = prefill.PrefillBootstrapQueue.__new__(prefill.PrefillBootstrapQueue)
        vars(queue).update(
            kv_manager=self.manager,
            pp_size=1,
            queue=[
                SimpleNamespace(disagg_kv_sender=peer, is_retracted=False, metadata_buffer_index=-1)
                for peer in peers
            ],
            req_to_metadata_buffer_idx_allocator=SimpleNamespace(available_size=lambda: 0),
            scheduler=self._scheduler(),
            scheduler_stage_metrics=None,
            can_prefill_before_bootstrap=lambda _: False,
        )
        return queue.pop_bootstrapped


def ceiling(case: Any, figure: str) -> float | None:
    """What is promised: long queues, nothing new to do."""
    return CEILING if case["queued"] == max(QUEUED) and figure == "nothing new" else None


BENCH = Bench(
    "One scheduler pass over a long queue",
    Queue,
    [{"queue": queue, "queued": queued} for queue in QUEUES for queued in QUEUED],
    ceiling,
    turns=3,
    work="queued",
)

if __name__ == "__main__":
    sys.exit(run(BENCH, __file__))
