# SPDX-License-Identifier: Apache-2.0
"""Backup and restore of a retracted request on SGLang's real pools.

    bench/retraction_backup.py --patched build/0.5.23/python [--stock PATH] [--json FILE]

On a GPU the pools are there and the copies cross the bus; without one all of it is host memory, and
only the ratio of the two trees says something.
"""

from __future__ import annotations

import itertools
import sys
import time
from types import SimpleNamespace
from typing import Any

from frame import Bench, Case, run

TOKENS = (128, 1024, 4096)  # of the retracted request
TARGET_LAYERS, DRAFT_LAYERS, HEADS, HEAD_DIM, HIDDEN = 16, 1, 8, 128, 4096
# Whether glibc gives the pages of a dropped copy back decides more than the copying itself.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
# Most that a backup or a restore may take of stock's time, beyond the share of the draft's layers.
SLACK = 1.25


class Side:
    """One tree: a request of some tokens, its rows in the target's and the draft's pool."""

    def __init__(self, tokens: int) -> None:
        import torch
        from sglang.srt.managers import schedule_batch
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.torch = torch

        def pool(layers: int) -> Any:
            return MHATokenToKVPool(
                size=2 * tokens,
                page_size=1,
                dtype=torch.float16,
                head_num=HEADS,
                head_dim=HEAD_DIM,
                layer_num=layers,
                device=self.device,
                enable_memory_saver=False,
            )

        target, self.draft = pool(TARGET_LAYERS), pool(DRAFT_LAYERS)
        self.allocator = TokenToKVPoolAllocator(
            2 * tokens, torch.float16, self.device, target, False
        )
        self.rows = ReqToTokenPool(1, tokens + 1, self.device, False)
        self.req = schedule_batch.Req.__new__(schedule_batch.Req)
        self.req.kv = schedule_batch.ReqKvInfo()
        self.req.kv.req_pool_idx = 0
        self.req.origin_input_ids, self.req.output_ids = [0] * tokens, [0]
        slots = torch.randperm(2 * tokens, device=self.device)[:tokens]
        self.rows.req_to_token[0, :tokens] = slots.to(torch.int32)
        self.side = self._attach()

    @property
    def patched(self) -> bool:
        return self.side is not None

    def _attach(self) -> Any:
        """The draft side of a patched tree's allocator; None in a stock tree."""
        try:
            from sglang.srt.mem_cache import retraction_backup
        except ImportError:
            return None
        runner = SimpleNamespace(token_to_kv_pool=self.draft)
        buffers = SimpleNamespace(
            output_topk_p=self.torch.zeros(1, 16),
            output_topk_index=self.torch.zeros(1, 16, dtype=self.torch.int64),
            output_hidden_states=self.torch.zeros(1, HIDDEN, dtype=self.torch.float16),
        )
        scheduler = SimpleNamespace(
            token_to_kv_pool_allocator=self.allocator,
            draft_worker=SimpleNamespace(_draft_model_runners=lambda: (runner,)),
            disagg_metadata_buffers=buffers,
        )
        retraction_backup.attach(scheduler)
        spec = SimpleNamespace(
            topk_p=self.torch.rand(1, 1, device=self.device),
            topk_index=self.torch.zeros(1, 1, dtype=self.torch.int64, device=self.device),
            hidden_states=self.torch.rand(1, HIDDEN, device=self.device),
        )
        self.batch = SimpleNamespace(reqs=[self.req], enable_overlap=False, spec_info=spec)
        return self.allocator.draft_side

    def turn(self) -> dict[str, float]:
        """Milliseconds of one backup and one restore; of this thread where it makes the copies."""
        now = time.perf_counter if self.device == "cuda" else time.thread_time
        marks = [now()]
        self.req.offload_kv_cache(self.rows, self.allocator)
        if self.side is not None:
            self.side.save_state(self.batch, 0)
        marks.append(now())
        held = _nbytes(self.req.kv.retraction_backup.cpu_tensors)
        marks.append(now())
        self.req.load_kv_cache(self.rows, self.allocator)
        marks.append(now())
        backup, _, restore = (1e3 * (b - a) for a, b in itertools.pairwise(marks))
        return {"backup": backup, "restore": restore, "held": held / 2**20}


def _nbytes(copy: Any) -> int:
    """Bytes of all tensors in a backup, in either tree."""
    if hasattr(copy, "nbytes"):
        return int(copy.nbytes)
    if hasattr(copy, "target"):
        copy = [copy.target, copy.draft]
    return sum(map(_nbytes, copy))


def ceiling(case: Case, figure: str) -> float:
    """What the draft's share of the layers explains, and some slack."""
    return SLACK * (1 + DRAFT_LAYERS / TARGET_LAYERS)


BENCH = Bench(
    f"Backup and restore, {TARGET_LAYERS} target layers and {DRAFT_LAYERS} draft layer",
    Side,
    [{"tokens": tokens} for tokens in TOKENS],
    ceiling,
    {"backup": "ms", "restore": "ms", "held": "MiB"},
    turns=15,
    work="tokens",
    environment=KEEP_FREED_MEMORY,
)

if __name__ == "__main__":
    sys.exit(run(BENCH, __file__))
