# SPDX-License-Identifier: Apache-2.0
"""The KV pools a speculative draft owns, on every release that has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import KVCache


def of(scheduler: Scheduler) -> tuple[KVCache, ...]:
    """The draft's own KV pools, one per draft model runner, in the order the draft steps use them.

    All are addressed by the target's slot ids. Empty without a draft model (ngram) and where the
    draft reads the target's pool (frozen KV).
    """
    target = scheduler.token_to_kv_pool_allocator.get_kvcache()
    pools: list[KVCache] = []
    for runner in _runners(scheduler.draft_worker):
        pool = runner.token_to_kv_pool
        if pool is not target and all(pool is not seen for seen in pools):
            pools.append(pool)
    return tuple(pools)


def _runners(draft_worker: Any) -> tuple[Any, ...]:
    """Model runners of the draft; which attribute holds them depends on release and worker."""
    if draft_worker is None:
        return ()
    if hasattr(draft_worker, "_draft_model_runners"):  # 0.5.18 and later
        return tuple(draft_worker._draft_model_runners())
    worker = getattr(draft_worker, "draft_worker", None) or draft_worker  # spec v2 wraps it
    runners = getattr(worker, "draft_runner_list", None) or getattr(
        worker, "model_runner_list", None
    )
    if runners:
        return tuple(runners)
    runner = getattr(worker, "draft_runner", None) or getattr(worker, "model_runner", None)
    return () if runner is None else (runner,)
