# SPDX-License-Identifier: Apache-2.0
"""Commit and prebuilt builder of a decode server: stock beside patched, on SGLang's real classes.

    bench/metadata_slots.py --patched build/0.5.23/python [--stock PATH] [--json FILE]

One process holds each tree; they take turns, so that both see the same machine. No GPU is needed:
the figures are host time, and the builder's copies go to the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HIDDEN = (7168, 3 * 7168)  # one layer's hidden state, and the three that EAGLE-3 concatenates
BATCHES = (1, 8, 64)
TOPK = 8
TURNS = 30
SECONDS_PER_TURN = 0.03
# Ceilings of patched over stock, per operation; None: stated, not judged.
CEILINGS = {("commit", None): 0.5, ("build", 64): 0.7}


class Side:
    """One tree: a transfer queue with committed and uncommitted entries, ready to be timed."""

    def __init__(self, hidden: int, batch: int) -> None:
        import torch
        from sglang.srt.disaggregation import decode, utils
        from sglang.srt.speculative import eagle_disaggregation, spec_info

        self.torch = torch
        self.patched = hasattr(utils.MetadataBuffers.get_buf, "__wrapped__")
        self.buffers = utils.MetadataBuffers(2 * batch, hidden, torch.bfloat16, 16)
        self.rows = SimpleNamespace(req_to_token=torch.zeros(2 * batch + 1, 8))
        self.queue = decode.DecodeTransferQueue.__new__(decode.DecodeTransferQueue)
        vars(self.queue).update(
            metadata_buffers=self.buffers,
            req_to_token_pool=self.rows,
            scheduler=SimpleNamespace(
                kv_checksum_computer=None,
                enable_decode_hicache=False,
                batch_result_processor=SimpleNamespace(
                    _maybe_update_reasoning_tokens=lambda *_: None
                ),
            ),
            spec_algorithm=spec_info.SpeculativeAlgorithm.EAGLE,
        )
        self.entries = [self._entry(decode, index) for index in range(batch)]
        self.batch = SimpleNamespace(
            reqs=[entry.req for entry in self.entries],
            device="cpu",
            enable_overlap=False,
            model_config=SimpleNamespace(hf_config=SimpleNamespace(), vocab_size=1000),
            req_to_token_pool=self.rows,
        )
        self.last_tokens = torch.zeros(batch, dtype=torch.int64)
        self.build_draft = eagle_disaggregation.build_eagle_disagg_draft_input
        self.commit()

    def _entry(self, decode: Any, index: int) -> Any:
        from array import array

        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        room = index + 1
        address = {"bootstrap_host": "127.0.0.1", "bootstrap_room": room}
        req = Req(f"r{index}", "", array("q", [1, 2]), SamplingParams(), **address)
        entry = decode.DecodeRequest(req=req, kv_receiver=None, metadata_buffer_index=index)
        self.buffers.bootstrap_room[index, 0] = room
        if self.patched:
            from sglang.srt.disaggregation import metadata_slots

            if index == 0:
                slots = metadata_slots.SlotPool(self.buffers.output_ids.shape[0])
                self.queue.req_to_metadata_buffer_idx_allocator = slots
                metadata_slots.bind(self.queue)
            entry.metadata_buffer_index = metadata_slots.allocate(self.queue, entry)
        return entry

    def commit(self) -> None:
        """Commit every entry once."""
        for entry in self.entries:
            entry.kv_receiver = RECEIVER
            entry.req.output_ids = []
            if self.patched:
                self._unhand(entry.req.metadata_slot)
            self.queue._commit_transfer_to_req(entry)

    def _unhand(self, slot: Any) -> None:
        """Back to where a transfer ends; the cost of it counts against the patch."""
        from sglang.srt.disaggregation.metadata_slots import Status

        if slot.status is not Status.TRANSFERRING:
            slot.pool.census[slot.status] -= 1
            slot.pool.census[Status.TRANSFERRING] += 1
            slot.status = Status.TRANSFERRING

    def build(self) -> None:
        """Build the draft input of the whole batch once."""
        self.build_draft(self.batch, self.last_tokens, None)

    def draft_bytes_copied(self) -> int:
        """Bytes of draft fields that one commit copies."""
        fields = ("output_topk_p", "output_topk_index", "output_hidden_states")
        sources = {getattr(self.buffers, name).untyped_storage().data_ptr() for name in fields}
        copied = 0

        class Copies(self.torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                nonlocal copied
                outcome = func(*args, **(kwargs or {}))
                source = args[0]
                if func.overloadpacket.__name__ in ("clone", "_to_copy", "copy_"):
                    source = args[1] if func.overloadpacket.__name__ == "copy_" else source
                    if source.untyped_storage().data_ptr() in sources:
                        copied += source.nbytes
                return outcome

        with Copies():
            self.commit()
        return copied // len(self.entries)


class _Receiver:
    def clear(self) -> None:
        """Nothing to clear."""


RECEIVER = _Receiver()


def microseconds(call: Callable[[], None], seconds: float) -> float:
    """Microseconds of one call, averaged over as many as fit into `seconds`."""
    calls, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        call()
        calls += 1
    return 1e6 * spent / calls


def serve() -> None:
    """Answer the parent's requests, one JSON line each: what to set up, what to time."""
    from sglang.srt.runtime_context import get_context

    get_context().override_server_args(
        speculative_algorithm="EAGLE", speculative_eagle_topk=TOPK, device="cpu"
    ).install()
    side: Side | None = None
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        asked = json.loads(line)
        if "hidden" in asked:
            side = Side(asked["hidden"], asked["batch"])
            answer: dict[str, Any] = {
                "patched": side.patched,
                "draft_bytes_copied": side.draft_bytes_copied(),
            }
        else:
            assert side is not None
            call = {"commit": side.commit, "build": side.build}[asked["time"]]
            answer = {"us": microseconds(call, SECONDS_PER_TURN)}
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    """A process that holds one tree."""

    def __init__(self, name: str, tree: str | None) -> None:
        from pdlab import standin

        path = [tree, str(standin.python_path())]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry for entry in path if entry),
            "OMP_NUM_THREADS": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
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
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(timeout=30)


def measure(workers: list[Worker]) -> list[dict[str, Any]]:
    """Every size: medians over turns in which the trees alternate."""
    rows = []
    for hidden in HIDDEN:
        for batch in BATCHES:
            answers = [worker.ask(hidden=hidden, batch=batch) for worker in workers]
            for worker, answer in zip(workers, answers, strict=True):
                if answer["patched"] != (worker.name == "patched"):
                    sys.exit(
                        f"{worker.name}: the tree is {'' if answer['patched'] else 'not '}patched"
                    )
            for operation, per in (("commit", batch), ("build", 1)):
                times: dict[str, list[float]] = {worker.name: [] for worker in workers}
                for turn in range(TURNS):
                    for worker in workers if turn % 2 else workers[::-1]:
                        times[worker.name].append(worker.ask(time=operation)["us"] / per)
                stock, patched = (statistics.median(times[w.name]) for w in workers)
                row = {
                    "operation": operation,
                    "hidden": hidden,
                    "batch": batch,
                    "stock_us": round(stock, 2),
                    "patched_us": round(patched, 2),
                    "ratio": round(patched / stock, 3),
                    "ceiling": CEILINGS.get((operation, None), CEILINGS.get((operation, batch))),
                }
                if operation == "commit":
                    copied = zip(workers, answers, strict=True)
                    row |= {f"{w.name}_draft_bytes": a["draft_bytes_copied"] for w, a in copied}
                rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for a reader; a commit is per request, a build per batch."""
    head = f"{'':8}{'hidden':>8}{'batch':>7}{'stock':>11}{'patched':>11}{'ratio':>8}  draft bytes"
    lines = [head]
    for row in rows:
        copied = ""
        if "stock_draft_bytes" in row:
            copied = f"{row['stock_draft_bytes']} -> {row['patched_draft_bytes']}"
        lines.append(
            f"{row['operation']:8}{row['hidden']:>8}{row['batch']:>7}{row['stock_us']:>8} us"
            f"{row['patched_us']:>8} us{row['ratio']:>8}  {copied}"
        )
    return "\n".join(lines)


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """What a row promises and does not hold."""
    found = []
    for row in rows:
        where = f"{row['operation']}, hidden {row['hidden']}, batch {row['batch']}"
        if row["ceiling"] is not None and row["ratio"] > row["ceiling"]:
            found.append(f"{where}: {row['ratio']} of stock, at most {row['ceiling']} promised")
        if row.get("patched_draft_bytes"):
            found.append(f"{where}: {row['patched_draft_bytes']} draft bytes copied, none promised")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patched", help="python folder of a built tree")
    parser.add_argument("--stock", help="python folder of a stock tree; the installed one if none")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return 0
    if not given.patched:
        parser.error("--patched is needed: seam tree build/0.5.23, then build/0.5.23/python")
    workers = [
        Worker("stock", str(Path(given.stock).resolve()) if given.stock else None),
        Worker("patched", str(Path(given.patched).resolve())),
    ]
    try:
        rows = measure(workers)
    finally:
        for worker in workers:
            worker.close()
    print(table(rows))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    for miss in missed(rows):
        print(miss, file=sys.stderr)
    return 1 if missed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
