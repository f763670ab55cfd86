# SPDX-License-Identifier: Apache-2.0
"""Matching a prompt for a new round on SGLang's real request and trees.

    bench/page_contract.py --patched build/0.5.23/python [--stock PATH] [--json FILE]

What is measured is the scheduler's thread alone, so no GPU is needed. The contract costs the same
for every prompt: some bytecodes of about 1,700, which is less than what the places of arrays and
code in memory are worth. So every turn builds its prompts anew, and there are several processes.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from random import Random
from typing import Any

from frame import Bench, Case, least_microseconds, run

PAGES = (1, 16, 64)
PROMPTS = (256, 4096, 32_768)
CACHED = 0.75  # of the prompt
ALL = "all prompts"
GAPS, MOST_GAP = 16, 300_000  # bytes between what is built, so that each turn's lies elsewhere
# A slice of a long prompt is always taken from the heap, never mapped anew.
HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


class Side:
    """Prompts of all lengths, in pages of one size."""

    def __init__(self, page: int) -> None:
        self.page, self.draw = page, Random(page)  # both trees draw the same places
        self.patched = find_spec("sglang.srt.mem_cache.page_contract") is not None

    def turn(self) -> dict[str, float]:
        gaps = [bytes(self.draw.randrange(MOST_GAP)) for _ in range(GAPS)]
        prompts = {f"{length} tokens": Prompt(self.page, length) for length in PROMPTS}
        del gaps
        times = {name: least_microseconds(prompt.match) for name, prompt in prompts.items()}
        return {**times, ALL: sum(times.values())}


class Prompt:
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


def ceiling(case: Case, figure: str) -> float | None:
    """What is promised: all prompts of a page size together."""
    return 1.02 if figure == ALL else None


BENCH = Bench(
    "Matching a prompt for a new round",
    Side,
    [{"page": page} for page in PAGES],
    ceiling,
    turns=720,
    pairs=8,
    environment=HEAP,
)

if __name__ == "__main__":
    sys.exit(run(BENCH, __file__))
