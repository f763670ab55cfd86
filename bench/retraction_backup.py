# SPDX-License-Identifier: Apache-2.0
"""Backup and restore of a retracted request: stock beside patched, on SGLang's real pools.

    bench/retraction_backup.py --patched build/0.5.23/python [--stock PATH] [--json FILE]

One process holds each tree; they take turns, so that both see the same machine. On a GPU the pools
are there and the copies cross the bus; without one all of it is host memory, and only the ratio of
the two trees says something.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOKENS = (128, 1024, 4096)  # of the retracted request
TARGET_LAYERS, DRAFT_LAYERS, HEADS, HEAD_DIM, HIDDEN = 16, 1, 8, 128, 4096
TURNS = 15
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
        """Milliseconds of one backup and one restore."""
        marks = [time.perf_counter()]
        self.req.offload_kv_cache(self.rows, self.allocator)
        if self.side is not None:
            self.side.save_state(self.batch, 0)
        marks.append(time.perf_counter())
        held = _nbytes(self.req.kv.retraction_backup.cpu_tensors)
        marks.append(time.perf_counter())
        self.req.load_kv_cache(self.rows, self.allocator)
        marks.append(time.perf_counter())
        backup, _, restore = (1e3 * (b - a) for a, b in itertools.pairwise(marks))
        return {"backup": backup, "restore": restore, "bytes": float(held)}


def _nbytes(copy: Any) -> int:
    """Bytes of all tensors in a backup, in either tree."""
    if hasattr(copy, "nbytes"):
        return int(copy.nbytes)
    if hasattr(copy, "target"):
        copy = [copy.target, copy.draft]
    return sum(map(_nbytes, copy))


def serve() -> None:
    """Answer the parent's requests, one JSON line each."""
    side: Side | None = None
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        asked = json.loads(line)
        if "tokens" in asked:
            side = Side(asked["tokens"])
            answer: dict[str, Any] = {"patched": side.side is not None, "device": side.device}
        else:
            assert side is not None
            answer = side.turn()
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    """A process that holds one tree."""

    def __init__(self, name: str, tree: str | None) -> None:
        from pdlab import standin

        path = [tree, str(standin.python_path() or "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry for entry in path if entry),
            "OMP_NUM_THREADS": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            **KEEP_FREED_MEMORY,
        }
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        print(json.dumps(what), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(
                f"{self.name}: the worker died; run {__file__} --serve with its path to see why"
            )
        return dict(json.loads(answer))

    def close(self) -> None:
        """End the process: it holds nothing that would have to be put away."""
        self.process.kill()
        self.process.wait()


def measure(workers: list[Worker]) -> list[dict[str, Any]]:
    """Every size: medians over turns in which the trees alternate."""
    rows = []
    for tokens in TOKENS:
        setups = [worker.ask(tokens=tokens) for worker in workers]
        if [setup["patched"] for setup in setups] != [False, True]:
            sys.exit("--stock names a patched tree, or --patched one without draft-retraction")
        for worker in workers:
            worker.ask(turn=0)
        turns = [[worker.ask(turn=turn) for worker in workers] for turn in range(TURNS)]
        for what in ("backup", "restore", "bytes"):
            stock, patched = (
                statistics.median(turn[side][what] for turn in turns) for side in (0, 1)
            )
            rows.append(
                {
                    "tokens": tokens,
                    "what": what,
                    "device": setups[0]["device"],
                    "stock": stock,
                    "patched": patched,
                    "ratio": patched / stock,
                }
            )
    return rows


def main() -> int:
    """Print the table; exit 1 when a time is above what the draft's share of layers explains."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--patched", metavar="PATH", help="`python` folder of a built tree")
    parser.add_argument("--stock", metavar="PATH", help="the same of a stock one (default: site)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return 0
    if not given.patched:
        parser.error("--patched is needed")
    workers = [Worker("stock", given.stock), Worker("patched", given.patched)]
    try:
        rows = measure(workers)
    finally:
        for worker in workers:
            worker.close()
    ceiling = SLACK * (1 + DRAFT_LAYERS / TARGET_LAYERS)
    print(f"{TARGET_LAYERS} target layers, {DRAFT_LAYERS} draft layer, {rows[0]['device']}")
    print("tokens  what          stock      patched  ratio")
    for row in rows:
        unit = "MiB" if row["what"] == "bytes" else "ms "
        scale = 2**20 if row["what"] == "bytes" else 1.0
        print(
            f"{row['tokens']:6}  {row['what']:8} {row['stock'] / scale:8.2f} {unit} "
            f"{row['patched'] / scale:8.2f} {unit}  {row['ratio']:.3f}"
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    slow = [row for row in rows if row["ratio"] > ceiling]
    for row in slow:
        print(f"{row['what']} of {row['tokens']} tokens: above {ceiling:.2f}", file=sys.stderr)
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
