# SPDX-License-Identifier: Apache-2.0
"""A retracted request gets its draft KV and its draft state back.

Retraction copies a request's rows of the target's pool to the host and frees its slots. The draft
has rows of its own under the same slot ids, and a state (top-k and hidden row) that the first step
after the resume drafts from. Both are kept here: the rows in the very object that holds the
target's, so that whatever drops one drops the other; the state in the fields of the request that
the prebuilt step reads it from.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache import draft_pools

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import KVCache

logger = logging.getLogger(__name__)

# A draft of several layers, which have drafted all tokens of the next step, keeps no hidden row.
_STATE, _MAY_LACK = ("topk_p", "topk_index", "hidden_states"), "hidden_states"


@dataclass(frozen=True)
class DraftedCopy:
    """Host copy of one request's KV rows: the target's, and one per draft pool.

    ``draft`` is None when the draft rows could not be kept. The parts are what the pools'
    ``get_cpu_copy`` returned; nothing but their ``load_cpu_copy`` looks inside.
    """

    target: Any
    draft: tuple[Any, ...] | None


@dataclass(frozen=True)
class StepInput:
    """Draft state that the decode step now in flight was launched with; row i is ``reqs[i]``'s."""

    reqs: list[Req]
    topk_p: torch.Tensor  # (batch, states) float
    topk_index: torch.Tensor  # (batch, states) int64
    hidden_states: torch.Tensor | None  # (batch, hidden)

    def row_of(self, req: Req) -> int | None:
        # Older releases extend the list in place after the launch: rows past the state are not its.
        rows = self.reqs[: len(self.topk_p)]
        return next((i for i, other in enumerate(rows) if other is req), None)


class DraftSide:
    """The draft's half of the retraction backups of one scheduler."""

    def __init__(self, scheduler: Scheduler, pools: tuple[KVCache, ...]) -> None:
        self.scheduler = scheduler
        self.pools = pools
        self._told: set[str] = set()

    def copy_rows(self, indices: torch.Tensor, **where: Any) -> tuple[Any, ...] | None:
        """Host copies of the draft rows at slots ``indices`` (n,), or None if they cannot be kept.

        ``where`` is what upstream addresses per-request state by (``mamba_indices``,
        ``req_pool_index``); a pool gets what its release's signature takes.
        """
        try:
            copies = tuple(
                pool.get_cpu_copy(indices, **_taken(pool.get_cpu_copy, where))
                for pool in self.pools
            )
        except NotImplementedError as error:
            self._tell(
                "pool",
                "The draft's KV pool cannot be copied to the host (%s): retracted requests resume "
                "without draft KV, draft badly until they end and are not cached.",
                error or type(self.pools[0]).__name__,
            )
            return None
        except (MemoryError, RuntimeError) as error:
            if not _is_host_oom(error):
                raise
            self._tell(
                "memory",
                "No host memory for the draft KV of a retracted request (%d tokens): it resumes "
                "without, drafts badly until it ends and is not cached. Give the server more "
                "host memory or lower its KV pressure.",
                len(indices),
            )
            return None
        self._tell(
            "cost",
            "A retracted request keeps its draft KV in host memory: %d bytes a token.",
            nbytes(copies) // max(len(indices), 1),
            level=logging.INFO,
        )
        return copies

    def load_rows(self, copies: tuple[Any, ...], indices: torch.Tensor, **where: Any) -> None:
        """Write ``copies`` to the draft rows at the request's new slots ``indices`` (n,)."""
        for pool, copy in zip(self.pools, copies, strict=True):
            pool.load_cpu_copy(copy, indices, **_taken(pool.load_cpu_copy, where))

    def save_state(self, batch: ScheduleBatch, idx: int) -> bool:
        """Keep the draft state of ``batch.reqs[idx]`` at its committed length, if it is known.

        Call it when the request's rows were released and before the batch is filtered. The state
        goes to where a transfer would have put it, in the layout of a metadata row. If it is not
        saved, these fields stay as they are: empty, which the prebuilt step takes as neutral.
        """
        state = self._state_of(batch, idx)
        if state is None:
            return False
        rows = self.scheduler.disagg_metadata_buffers
        layouts = (rows.output_topk_p, rows.output_topk_index, rows.output_hidden_states)
        try:
            saved = [_as_row(part, layout) for part, layout in zip(state, layouts, strict=True)]
        except (MemoryError, RuntimeError) as error:
            if not _is_host_oom(error):
                raise
            self._tell(
                "state",
                "No host memory for the draft state of a retracted request: it resumes from a "
                "neutral row, which costs it one draft step.",
            )
            return False
        req = batch.reqs[idx]
        req.output_topk_p, req.output_topk_index, req.hidden_states_tensor = saved
        return True

    def _state_of(self, batch: ScheduleBatch, idx: int) -> list[torch.Tensor | None] | None:
        """Rows (states,), (states,), (hidden,) that belong to the tokens the scheduler knows of.

        Without overlap that is the batch's own state. With it the request may be in a step whose
        result will be thrown away: then what that step started from, else the relayed row.
        """
        if not batch.enable_overlap:
            return _row(batch.spec_info, idx)
        relay = self.scheduler.future_map
        step: StepInput | None = getattr(relay, "step_input", None)
        in_flight = step is not None and self._decode_in_flight()
        launched = step.row_of(batch.reqs[idx]) if step is not None and in_flight else None
        _await_forward(self.scheduler, batch.device)
        if launched is not None:
            return _row(step, launched)
        future = getattr(batch.spec_info, "future_indices", None)
        if future is None:
            return None
        slots = future if isinstance(future, torch.Tensor) else future.indices  # to 0.5.12
        return _row(relay, slots[idx], suffix="_buf")

    def _decode_in_flight(self) -> bool:
        queue = getattr(self.scheduler, "result_queue", None) or ()
        return any(batch.forward_mode.is_decode() for batch, _ in queue)

    def _tell(self, reason: str, message: str, *args: Any, level: int = logging.WARNING) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.log(level, message, *args)


def attach(scheduler: Scheduler) -> None:
    """Give the scheduler's allocator its draft side; nothing to do without a draft that owns KV.

    Backups in the host pool (0.5.18 and later) have the rows of the draft pools that its plan
    names; a second side keeps those of the others, the further layers of an unpacked draft.
    """
    pools = draft_pools.of(scheduler)
    if not pools:
        return
    allocator = scheduler.token_to_kv_pool_allocator
    allocator.draft_side = DraftSide(scheduler, pools)
    plan = getattr(scheduler.draft_worker, "hicache_draft_plan", None)
    pooled = () if plan is None else tuple(plan.device_pools)
    others = tuple(pool for pool in pools if all(pool is not kept for kept in pooled))
    allocator.unpooled_draft_side = DraftSide(scheduler, others) if pooled and others else None


def get_cpu_copy(allocator: Any, indices: torch.Tensor, **where: Any) -> Any:
    """Host copy of the rows ``indices`` (n,), the draft's with the target's where there are any."""
    target = allocator.get_cpu_copy(indices, **where)
    side: DraftSide | None = getattr(allocator, "draft_side", None)
    return target if side is None else DraftedCopy(target, side.copy_rows(indices, **where))


def load_cpu_copy(req: Req, allocator: Any, copy: Any, indices: torch.Tensor, **where: Any) -> None:
    """Restore what ``get_cpu_copy`` returned to the request's new slots ``indices`` (n,)."""
    if not isinstance(copy, DraftedCopy):
        allocator.load_cpu_copy(copy, indices, **where)
        return
    allocator.load_cpu_copy(copy.target, indices, **where)
    _load_draft(req, allocator.draft_side, copy, indices, **where)


def keeps_unpooled_rows(backup: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tree's backup into its host pool: draft rows that the pool has no place for go along.

    They take the field of the backup that holds host copies, which this kind leaves empty.
    """

    @functools.wraps(backup)
    def wrapper(tree: Any, req: Req) -> Any:
        kept = backup(tree, req)
        side: DraftSide | None = _unpooled(tree)
        if kept is None or side is None:
            return kept
        return kept._replace(cpu_tensors=DraftedCopy(None, side.copy_rows(_slots(tree, req))))

    return wrapper


def restores_unpooled_rows(restore: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the restore that belongs to ``keeps_unpooled_rows``."""

    @functools.wraps(restore)
    def wrapper(tree: Any, req: Req, kept: Any) -> None:
        restore(tree, req, kept)
        side: DraftSide | None = _unpooled(tree)
        if side is not None and kept.cpu_tensors is not None:
            _load_draft(req, side, kept.cpu_tensors, _slots(tree, req))

    return wrapper


def _load_draft(
    req: Req, side: DraftSide, copy: DraftedCopy, indices: torch.Tensor, **where: Any
) -> None:
    """A request that comes back without draft rows must not publish the rows it has: others would
    draft from them. It is kept out of the prefix cache.
    """
    if copy.draft is None:
        req.skip_radix_cache_insert = True
    else:
        side.load_rows(copy.draft, indices, **where)


def _unpooled(tree: Any) -> DraftSide | None:
    side: DraftSide | None = getattr(tree.token_to_kv_pool_allocator, "unpooled_draft_side", None)
    return side


def _slots(tree: Any, req: Req) -> torch.Tensor:
    """Slots (n,) int64 of the request's tokens that have KV, as the tree's backup takes them."""
    row = req.req_pool_idx if hasattr(req, "req_pool_idx") else req.kv.req_pool_idx  # from 0.5.19
    rows: torch.Tensor = tree.req_to_token_pool.req_to_token
    return rows[row, : req.seqlen - 1].to(torch.int64)


def discard_superseded(req: Req, tree_cache: Any) -> None:
    """Drop a host-pool backup that the request still waits for, before its KV is given up.

    What a transfer received into host memory is such a backup until the request is scheduled. Kept
    past a release it would be restored over KV that was computed anew, under other weights.
    """
    from sglang.srt.mem_cache.common import discard_kv_cache_backup

    if req.kv.retraction_backup is not None:
        discard_kv_cache_backup(req, tree_cache, "host_pool")


def keeps_draft_state(release_req: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``ScheduleBatch.release_req``: a request to be resumed keeps its draft state."""

    @functools.wraps(release_req)
    def wrapper(batch: ScheduleBatch, idx: int, *args: Any, **kwargs: Any) -> Any:
        backed_up = release_req(batch, idx, *args, **kwargs)
        side: DraftSide | None = getattr(batch.token_to_kv_pool_allocator, "draft_side", None)
        if (
            side is not None
            and backed_up is not False
            and batch.reqs[idx].to_finish is None
            and side.scheduler.disaggregation_mode.value == "decode"
        ):
            side.save_state(batch, idx)
        return backed_up

    return wrapper


def keeps_step_input(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the relay's gather: references to what the launched step drafts from, until the next."""

    @functools.wraps(resolve)
    def wrapper(future_map: FutureMap, batch: Any) -> Any:
        resolved = resolve(future_map, batch)
        parts = _parts(batch.spec_info)
        future_map.step_input = None if parts is None else StepInput(batch.reqs, **parts)
        return resolved

    return wrapper


def _parts(source: Any, suffix: str = "") -> dict[str, Any] | None:
    """The draft state that `source` has, by name; None if a part is missing that it needs."""
    parts = {name: getattr(source, name + suffix, None) for name in _STATE}
    missing = {name for name, part in parts.items() if part is None}
    return None if missing - {_MAY_LACK} else parts


def _row(source: Any, row: Any, suffix: str = "") -> list[torch.Tensor | None] | None:
    parts = _parts(source, suffix)
    if parts is None:
        return None
    return [None if part is None else part[row] for part in parts.values()]


def nbytes(copy: Any) -> int:
    """Bytes of all tensors in a host copy, whatever containers its pool chose."""
    return sum(tensor.nbytes for tensor in _tensors(copy))


def _tensors(copy: Any) -> Iterator[torch.Tensor]:
    if isinstance(copy, torch.Tensor):
        yield copy
    elif isinstance(copy, DraftedCopy):
        yield from _tensors((copy.target, copy.draft))
    elif isinstance(copy, dict):
        yield from _tensors(tuple(copy.values()))
    elif isinstance(copy, (list, tuple)):
        for part in copy:
            yield from _tensors(part)


def _taken(method: Callable[..., Any], where: dict[str, Any]) -> dict[str, Any]:
    names = inspect.signature(method).parameters
    return {name: value for name, value in where.items() if name in names}


def _as_row(state: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """``state`` in the layout of one row of ``rows``: its width, dtype and device; else zeros."""
    row = rows.new_zeros(rows.shape[1])
    known = row[:0] if state is None else state.reshape(-1)
    row[: len(known)] = known.to(device=rows.device, dtype=rows.dtype)
    return row


def _await_forward(scheduler: Scheduler, device: str) -> None:
    """Let the caller's stream read what the forward stream has been given to write so far."""
    torch.get_device_module(device).current_stream().wait_stream(scheduler.forward_stream)


def _is_host_oom(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
