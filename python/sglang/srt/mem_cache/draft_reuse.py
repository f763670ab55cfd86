# SPDX-License-Identifier: Apache-2.0
"""Whether a draft may reuse cached KV, or the cached part must be computed again.

A prefix hit is one decision for target and draft: the draft cannot make up rows that it lacks,
for that takes the target's hidden states of the prefix. So a hit whose draft rows are not known to
have been written and brought back is not taken, and its tokens are computed in full. Hits that stay
on the device need no question: whoever computed those rows wrote the draft's with them.

`SGLANG_DRAFT_REUSE_UNVERIFIED=1` takes the hits all the same and lets the accept length suffer.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache import draft_pools

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

UNVERIFIED = "SGLANG_DRAFT_REUSE_UNVERIFIED"
OVERRIDE = f"{UNVERIFIED}=1 takes such hits all the same, at the price of the accept length."


class Reason(Enum):
    """Why a hit is not taken for a draft."""

    UNSAVED = "the host cache does not keep the draft's KV rows"
    INDEX = "the host cache does not keep the indexer keys of the draft"
    STORAGE = "storage did not give back the draft's pages"
    SHARDED = "the rows of a sharded draft pool would be spliced from other ranks' stripes"


refused: Counter[Reason] = Counter()
"""Hits that this process did not take, or cut, by reason."""

_told: set[Reason] = set()


def tell(reason: Reason, what: str, instead: str) -> None:
    """Count a refusal, and warn once per process and reason: what, why, and what to set."""
    refused[reason] += 1
    if reason not in _told:
        _told.add(reason)
        logger.warning("%s, for %s. %s %s", what, reason.value, instead, OVERRIDE)


def unverified_allowed() -> bool:
    return os.environ.get(UNVERIFIED, "").lower() in ("1", "true", "yes")


def attach(scheduler: Scheduler) -> None:
    """Note at the scheduler's tree whether host hits bring the draft's rows along."""
    scheduler.tree_cache.draft_refusal = None if unverified_allowed() else refusal(scheduler)


def refusal(scheduler: Scheduler) -> Reason | None:
    """Why host hits of the scheduler's cache cannot serve its draft; None where they can."""
    controller = getattr(scheduler.tree_cache, "cache_controller", None)
    pools = draft_pools.of(scheduler)
    if controller is None or not pools:
        return None
    plan = getattr(scheduler.draft_worker, "hicache_draft_plan", None)
    if plan is not None:  # 0.5.18 and later name the pools they keep, indexer keys included
        kept = tuple(plan.device_pools)
    elif _copies_draft(controller):
        kept = (controller.mem_pool_device_draft,)
    else:
        kept = ()
    if not all(any(_rows_of(pool) is _rows_of(saved) for saved in kept) for pool in pools):
        return Reason.UNSAVED
    if plan is None and any(hasattr(pool, "index_k_with_scale_buffer") for pool in pools):
        return Reason.INDEX
    return None


def refuses(load_back: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tree's ``load_back``: where the draft's rows would not come along, nothing is loaded.

    That is how a tree declines when device memory is short, so every caller knows what to do.
    """

    @functools.wraps(load_back)
    def wrapper(tree: Any, *args: Any, **kwargs: Any) -> Any:
        if (reason := _refusal_of(tree)) is None:
            return load_back(tree, *args, **kwargs)
        _tell_untaken(reason)
        return None

    return wrapper


def promises_taken_hits(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap decode's building of a prefix match: what it will not load it does not promise.

    Decode tells prefill how much of the prompt it has before it loads any of it, and a promise that
    is broken later fails the request.
    """

    @functools.wraps(build)
    def wrapper(queue: Any, *args: Any, **kwargs: Any) -> Any:
        match = build(queue, *args, **kwargs)
        reason = _refusal_of(queue.tree_cache)
        if reason is None or match.decode_prefix_len == match.l1_prefix_len:
            return match
        _tell_untaken(reason)
        return replace(match, l2_host_hit_length=0, l3_storage_hit_length=0, last_host_node=None)

    return wrapper


def _refusal_of(tree: Any) -> Reason | None:
    reason: Reason | None = getattr(tree, "draft_refusal", None)
    return reason


def _tell_untaken(reason: Reason) -> None:
    tell(
        reason,
        "Host cache hits are not taken",
        "Prompts are computed from their device prefix on; without "
        "--enable-hierarchical-cache the host memory is saved.",
    )


@dataclass
class DraftRead:
    """How much of one storage operation the draft's pages were there for."""

    pages: int = 0
    short: bool = False


def note_pages(controller: Any, found: Any) -> None:
    """Note how many leading pages a storage backend gave for the read it was just asked for.

    ``found`` is what it returned: a list with None for a page it lacks, or the verdicts of a
    transfer by pool. None and shapes that say nothing count as no page.
    """
    if isinstance(found, dict):
        found = next(iter(found.values()), None)
    if isinstance(found, int) and not isinstance(found, bool):
        pages = found
    else:
        verdicts = list(found) if isinstance(found, Sequence) else []
        pages = next((i for i, page in enumerate(verdicts) if _missing(page)), len(verdicts))
    controller.draft_read.pages = pages


def read_pages(
    controller: Any, hashes: list[str], host_indices: torch.Tensor
) -> tuple[list[str], torch.Tensor]:
    """Read the draft's pages of a batch; returns the part of the batch that they were read for.

    ``hashes`` name pages, ``host_indices`` (pages x page size,) their slots in the host pool.
    """
    read = controller.draft_read = DraftRead()
    controller._draft_page_get(hashes, host_indices)
    if read.pages >= len(hashes) or unverified_allowed():
        return hashes, host_indices
    read.short = True
    tell(
        Reason.STORAGE,
        f"A storage hit is cut to {read.pages} of {len(hashes)} pages",
        "The rest of the prompt is computed. Pages stored before this server drafted, or by one "
        "that does not draft, have no draft pages: clear the store or give it a namespace.",
    )
    return hashes[: read.pages], host_indices[: read.pages * controller.page_size]


def ran_short(controller: Any, operation: Any) -> bool:
    """Whether the batch just read was cut; then the operation ends with what it has."""
    read: DraftRead | None = getattr(controller, "draft_read", None)
    if read is None or not read.short:
        return False
    operation.mark_terminate()
    return True


def gate_sharded(server_args: Any, cfg: Any) -> None:
    """Keep prefix hits away from a draft whose pool is sharded, unless they are asked for.

    ``cfg`` is the resolving view of ``server_args``. Chunks of one prompt still follow each other:
    their rows were written by the very request that reads them.
    """
    if (
        not cfg.enable_kv_cache_sharding
        or cfg.speculative_algorithm is None
        or cfg.disable_radix_cache
        or unverified_allowed()
    ):
        return
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(
        server_args,
        "draft_reuse",
        disable_radix_cache=True,
        enable_hierarchical_cache=False,
    )
    tell(
        Reason.SHARDED,
        "Prefix cache hits are not taken with --enable-kv-cache-sharding",
        "Every prompt is computed in full.",
    )


def _copies_draft(controller: Any) -> bool:
    """Whether the controller's own copy routine moves the pool that is registered as the draft's.

    The hybrid controller of 0.5.11 to 0.5.13 accepts the pool and overrides the routine without it.
    """
    code = getattr(type(controller).start_writing, "__code__", None)
    registered = getattr(controller, "has_draft", False)
    return registered and code is not None and "has_draft" in code.co_names


def _rows_of(pool: Any) -> Any:
    """The pool that holds the rows: hybrid linear pools wrap theirs."""
    return pool.full_kv_pool if hasattr(pool, "linear_layer_ids") else pool


def _missing(page: Any) -> bool:
    return page is None or page is False
