# SPDX-License-Identifier: Apache-2.0
"""The KV pools a speculative draft owns, on every release that has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.model_runner import ModelRunner


def of(scheduler: Scheduler) -> tuple[KVCache, ...]:
    """The draft's own KV pools, one per draft model runner, in the order the draft steps use them.

    All are addressed by the target's slot ids. Empty without a draft model (ngram) and where the
    draft reads the target's pool (frozen KV).
    """
    return tuple(runner.token_to_kv_pool for runner in runners(scheduler))


def runners(scheduler: Scheduler) -> tuple[ModelRunner, ...]:
    """The model runners behind the pools that `of` returns, in the same order."""
    target = scheduler.token_to_kv_pool_allocator.get_kvcache()
    owners: list[ModelRunner] = []
    for runner in _all_runners(scheduler.draft_worker):
        pool = runner.token_to_kv_pool
        if pool is not target and all(pool is not seen.token_to_kv_pool for seen in owners):
            owners.append(runner)
    return tuple(owners)


def _all_runners(draft_worker: Any) -> tuple[Any, ...]:
    """Model runners of the draft; which attribute holds them depends on release and worker."""
    if draft_worker is None:
        return ()
    if hasattr(draft_worker, "_draft_model_runners"):  # 0.5.18 and later
        return tuple(draft_worker._draft_model_runners())
    worker = getattr(draft_worker, "draft_worker", None) or draft_worker  # spec v2 wraps it
    several = getattr(worker, "draft_runner_list", None) or getattr(
        worker, "model_runner_list", None
    )
    if several:
        return tuple(several)
    runner = getattr(worker, "draft_runner", None) or getattr(worker, "model_runner", None)
    return () if runner is None else (runner,)
