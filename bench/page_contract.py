# SPDX-License-Identifier: Apache-2.0
"""Matching a prompt for a new round: stock beside patched, on SGLang's real request and trees.

    bench/page_contract.py --patched build/0.5.23/python [--stock PATH] [--json FILE]

One process holds each tree; they take turns, so that both see the same machine. What is measured is
the scheduler's thread alone, so no GPU is needed. The contract costs the same for every prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PAGES = (1, 16, 64)
PROMPTS = (256, 4096, 32_768)
CACHED = 0.75  # of the prompt
TURNS = 60
SECONDS_PER_TURN = 0.02
CALLS_PER_LOOK = 20  # at the clock, which costs a match's hundredth
CEILING = 1.02
"""Patched over stock, summed over the prompts of a page size."""


class Side:
    """One tree with a cached prefix, and a request that begins with it."""

    def __init__(self, page: int, prompt: int) -> None:
        import torch
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
        from sglang.srt.sampling.sampling_params import SamplingParams

        allocator = _Allocator(page)
        self.tree = RadixCache(CacheInitParams(False, None, allocator, page))
        ids = _ids(range(prompt))
        cached = int(prompt * CACHED) // page * page
        self.tree.insert(InsertParams(key=RadixKey(ids[:cached], None), value=torch.arange(cached)))
        self.req = Req("r", "", ids, SamplingParams())
        self.patched = find_spec("sglang.srt.mem_cache.page_contract") is not None

    def match(self) -> None:
        """One new round of the request."""
        self.req.init_next_round_input(self.tree)


class _Allocator:
    device = "cpu"

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size


def _ids(values: range) -> Any:
    """Token ids as a prompt of the release has them."""
    from array import array

    from sglang.srt.managers import schedule_batch

    return array("q", values) if hasattr(schedule_batch, "array") else list(values)


def serve() -> None:
    """Answer the parent's requests, one JSON line each: what to set up, or to time it."""
    side: Side | None = None
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        asked = json.loads(line)
        if "page" in asked:
            side = Side(asked["page"], asked["prompt"])
            answer: dict[str, Any] = {"patched": side.patched}
        else:
            assert side is not None
            answer = {"us": microseconds(side)}
        print(json.dumps(answer), file=answers, flush=True)


def microseconds(side: Side) -> float:
    """Microseconds of one match, averaged over as many as fit into a turn."""
    calls, start = 0, time.thread_time()
    while (spent := time.thread_time() - start) < SECONDS_PER_TURN:
        for _ in range(CALLS_PER_LOOK):
            side.match()
        calls += CALLS_PER_LOOK
    return 1e6 * spent / calls


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
    """Every page and prompt: lower quartiles over turns in which the trees alternate.

    Others on the machine only ever add to a turn, so its quicker half says what the code takes.
    """
    rows = []
    for page in PAGES:
        for prompt in PROMPTS:
            for worker in workers:
                patched = worker.ask(page=page, prompt=prompt)["patched"]
                if patched != (worker.name == "patched"):
                    sys.exit(f"{worker.name}: the tree is {'' if patched else 'not '}patched")
            times: dict[str, list[float]] = {worker.name: [] for worker in workers}
            for turn in range(TURNS):
                for worker in workers if turn % 2 else workers[::-1]:
                    times[worker.name].append(worker.ask(time=True)["us"])
            stock, patched_us = (statistics.quantiles(times[w.name])[0] for w in workers)
            rows.append(
                {
                    "page": page,
                    "prompt": prompt,
                    "stock_us": round(stock, 2),
                    "patched_us": round(patched_us, 2),
                    "ratio": round(patched_us / stock, 3),
                }
            )
    return rows


def by_page(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Patched over stock for each page size, all its prompts together."""
    ratios = {}
    for page in PAGES:
        mine = [row for row in rows if row["page"] == page]
        stock, patched = (sum(row[f"{name}_us"] for row in mine) for name in ("stock", "patched"))
        ratios[page] = round(patched / stock, 3)
    return ratios


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for a reader."""
    lines = [f"{'page':>6}{'prompt':>8}{'stock':>11}{'patched':>12}{'ratio':>8}"]
    for row in rows:
        lines.append(
            f"{row['page']:>6}{row['prompt']:>8}{row['stock_us']:>8} us"
            f"{row['patched_us']:>9} us{row['ratio']:>8}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--patched", metavar="PATH", help="`python` folder of a built tree")
    parser.add_argument("--stock", metavar="PATH", help="the same of a stock one; else installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    if not options.patched:
        parser.error("--patched says which tree to measure beside stock")
    workers = [Worker("stock", options.stock), Worker("patched", options.patched)]
    rows = measure(workers)
    for worker in workers:
        worker.close()
    ratios = by_page(rows)
    print(table(rows))
    print("by page:", ", ".join(f"{page} {ratio}" for page, ratio in ratios.items()))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "by_page": ratios}, indent=2) + "\n")
    over = [page for page, ratio in ratios.items() if ratio > CEILING]
    if over:
        print(f"over {CEILING} of stock at page {', '.join(map(str, over))}")
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
