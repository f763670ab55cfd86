# SPDX-License-Identifier: Apache-2.0
"""Who holds which metadata-buffer row on the decode side, from allocation to release.

A row passes from the queue entry that receives into it to the request that drafts from it, and it
comes back once, whichever way that request leaves:

    FREE -> TRANSFERRING -> WAITING -> PREBUILT -> FREE     received, committed, read, first result
                 |  |          |__________|______-> FREE    abort, retraction, finish, failed step
                 |  |____________________________-> FREE    nothing drafts from it, or it drained
                 |______________-> QUARANTINED ---> FREE    aborted while a sender may still write

The prebuilt batch reads rows in place, so a row is held until the first real decode result has been
processed: only then is the read known to have happened, whatever memory the buffer is in.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest
    from sglang.srt.disaggregation.utils import MetadataBuffers
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

Step = TypeVar("Step", bound=Callable[..., Any])

# What SGLang waits for an aborted sender from 0.5.19 on (environ.py); earlier releases have no such
# setting and get the same limit.
DEFAULT_QUARANTINE_SECONDS = 30.0

# The fields of a request that read its row.
DRAFT_FIELDS = (
    "output_topk_p",
    "output_topk_index",
    "hidden_states_tensor",
    "output_dsa_topk_indices",
)


class Status(Enum):
    """Where a row is on its way; see the module docstring for the transitions."""

    FREE = "free"
    TRANSFERRING = "transferring"
    WAITING = "waiting"
    PREBUILT = "prebuilt"
    QUARANTINED = "quarantined"


class Verdict(Enum):
    """What became of a row that somebody let go of."""

    KEPT = "kept"
    FREED = "freed"
    QUARANTINED = "quarantined"


class SlotError(RuntimeError):
    """A row was asked for by somebody who does not own it (any more)."""


@dataclass(eq=False, slots=True)
class Slot:
    """One owner's lease of one row; the next lease of the row is another Slot."""

    pool: SlotPool
    index: int
    generation: int
    owner: str
    since: float
    """When it was leased, on the monotonic clock, in seconds."""
    status: Status = Status.TRANSFERRING

    def hand_over(self) -> None:
        """The transfer is committed: the row passes from the queue entry to the request."""
        self._move("hand-over", Status.WAITING, Status.TRANSFERRING)

    def read(self) -> int:
        """Returns the index for the prebuilt batch, which must not let go before its result."""
        if self.status is not Status.PREBUILT:
            self._move("read", Status.PREBUILT, Status.WAITING)
        return self.index

    def release(self, by: str) -> Verdict:
        """The owner `by` gives the row back for the next one."""
        if by != self.owner:
            raise SlotError(self.pool.refusal(self, f"release by {by!r}"))
        self._move("release", Status.FREE, Status.TRANSFERRING, Status.WAITING, Status.PREBUILT)
        self.pool.take_back(self)
        return Verdict.FREED

    def abandon(self) -> Verdict:
        """The owner is gone but its sender may still write: nobody gets the row for a while."""
        self._move("abandon", Status.QUARANTINED, Status.TRANSFERRING)
        self.pool.shut_away(self)
        return Verdict.QUARANTINED

    def expire(self) -> None:
        """The sender's time is over."""
        self._move("expiry", Status.FREE, Status.QUARANTINED)
        self.pool.take_back(self)

    def _move(self, what: str, to: Status, *allowed: Status) -> None:
        if self.status not in allowed:
            raise SlotError(self.pool.refusal(self, what))
        self.pool.census[self.status] -= 1
        self.pool.census[to] += 1
        self.status = to


class SlotPool:
    """Rows of the metadata buffers; takes the place of SGLang's index allocator.

    `size` rows, handed out first in, first out. Invariants, checked by `check_integrity`: a row is
    free, or held by exactly one Slot; every Slot in `holders` names the index it is found at; the
    census adds up to `size`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free_slots: deque[int] = deque(range(size))
        self.holders: list[Slot | None] = [None] * size
        self.generations = [0] * size
        self.census = dict.fromkeys(Status, 0) | {Status.FREE: size}
        self.longest_hold = 0.0
        """Seconds of the longest hold among rows that came back; whoever reports it resets it."""
        self.buffers: MetadataBuffers | None = None
        self._queue: DecodePreallocQueue | None = None
        self._quarantine: deque[tuple[Slot, float]] = deque()
        self._quarantine_seconds = _quarantine_seconds()

    def bind(self, queue: DecodePreallocQueue) -> None:
        """Learn the buffers the rows are in and the ranks that must agree on expiry."""
        self.buffers = queue.metadata_buffers
        self._queue = queue

    @property
    def group(self) -> Any:
        """The process group whose ranks decide alike about the queue; None before `bind`."""
        return None if self._queue is None else self._queue.gloo_group

    def available_size(self) -> int:
        """Rows that can be leased now. Zero delays admission; it is never an error."""
        if not self.free_slots and self._quarantine:
            self._expire_quarantined()
        return len(self.free_slots)

    def lease(self, owner: str) -> Slot | None:
        """A row for the request `owner`, or None when there is none."""
        if not self.free_slots:
            return None
        index = self.free_slots.popleft()
        assert self.holders[index] is None, self.refusal(self.holders[index], "lease")
        self.generations[index] += 1
        slot = Slot(self, index, self.generations[index], owner, time.monotonic())
        self.holders[index] = slot
        self.census[Status.FREE] -= 1
        self.census[slot.status] += 1
        return slot

    def alloc(self) -> int | None:
        """SGLang's own interface, as the prefill side uses it: a row without a named owner."""
        slot = self.lease(owner="")
        return None if slot is None else slot.index

    def free(self, free_index: int) -> None:
        """SGLang's own interface: gives back a row that `alloc` returned.

        Raises:
            SlotError: the row is free already, or belongs to a request.
        """
        slot = self.holders[free_index]
        if slot is None:
            raise SlotError(f"metadata row {free_index}: release by index refused, it is free")
        slot.release(by="")

    def take_back(self, slot: Slot) -> None:
        """Put the row of a released `slot` at the end of the line, marked as not yet written."""
        assert self.holders[slot.index] is slot, self.refusal(slot, "return")
        self.holders[slot.index] = None
        self.longest_hold = max(self.longest_hold, time.monotonic() - slot.since)
        self._mark_unwritten(slot.index)
        self.free_slots.append(slot.index)

    def shut_away(self, slot: Slot) -> None:
        """Keep the row of an abandoned `slot` out of the line until its sender's time is over."""
        self._mark_unwritten(slot.index)
        self._quarantine.append((slot, time.monotonic() + self._quarantine_seconds))

    def abandon_transfers(self) -> None:
        """Shut away every row whose queue entry is dropped together with its queue."""
        for slot in self.holders:
            if slot is not None and slot.status is Status.TRANSFERRING:
                slot.abandon()

    def held(self) -> list[Slot]:
        """Rows that belong to somebody, in index order."""
        return [s for s in self.holders if s is not None and s.status is not Status.QUARANTINED]

    def take_longest_hold(self) -> float:
        """Seconds of the longest hold that went on since this was last asked, and reset it."""
        now = time.monotonic()
        longest = max([self.longest_hold, *(now - slot.since for slot in self.held())])
        self.longest_hold = 0.0
        return longest

    def counts(self) -> dict[str, int]:
        """Rows by status; a quarantined row whose limit has passed counts as free."""
        now = time.monotonic()
        expired = sum(deadline <= now for _, deadline in self._quarantine)
        counts = {status.value: n for status, n in self.census.items()}
        counts[Status.FREE.value] += expired
        counts[Status.QUARANTINED.value] -= expired
        return counts

    def refusal(self, slot: Slot | None, what: str) -> str:
        """Why `what` is refused, naming the owner of `slot` and whoever holds its row now."""
        assert slot is not None
        now = self.holders[slot.index]
        holder = "nobody" if now is None else f"{now.owner!r} (generation {now.generation})"
        return (
            f"metadata row {slot.index}: {what} refused; {slot.owner!r} (generation "
            f"{slot.generation}) is {slot.status.value}, the row is held by {holder}"
        )

    def check_integrity(self) -> None:
        """Raise AssertionError, naming both sides, when the rows do not add up."""
        free = set(self.free_slots)
        assert len(free) == len(self.free_slots), f"a row is in the line twice: {self.free_slots}"
        seen = dict.fromkeys(Status, 0) | {Status.FREE: len(free)}
        for index, slot in enumerate(self.holders):
            assert (slot is None) == (index in free), f"row {index}: {slot} and {index in free=}"
            if slot is not None:
                assert slot.index == index, f"row {index} is held by a slot of row {slot.index}"
                seen[slot.status] += 1
        assert seen == self.census, f"counted {seen}, recorded {self.census}"
        assert sum(seen.values()) == self.size, f"counted {sum(seen.values())} of {self.size} rows"
        assert seen[Status.QUARANTINED] == len(self._quarantine), f"{seen}, {self._quarantine}"

    def _mark_unwritten(self, index: int) -> None:
        """Clear what the next owner reads to see whether its row has arrived (room 0 = not yet)."""
        if self.buffers is None:
            return
        if hasattr(self.buffers, "clear_slot"):
            self.buffers.clear_slot(index)
        else:
            self.buffers.bootstrap_room[index] = 0

    def _expire_quarantined(self) -> None:
        """Return rows whose limit has passed, as many as every rank of the queue's group can.

        Only reached when no row is free, which all ranks see alike; clocks they do not.
        """
        now = time.monotonic()
        expired = sum(deadline <= now for _, deadline in self._quarantine)
        for _ in range(_smallest(expired, self.group)):
            slot, _ = self._quarantine.popleft()
            slot.expire()


def _smallest(count: int, group: Any) -> int:
    """The smallest `count` among the ranks of `group`."""
    dist = torch.distributed
    if group is None or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return count
    agreed = torch.tensor([count], dtype=torch.int64)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    return int(agreed.item())


def _quarantine_seconds() -> float:
    from sglang.srt.environ import envs

    limit = getattr(envs, "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT", None)
    return DEFAULT_QUARANTINE_SECONDS if limit is None else float(limit.get())


def pool_size(req_to_token_pool: ReqToTokenPool, headroom: int) -> int:
    """Rows to build the decode side's buffers with: one for every row of the request pool, and
    SGLang's own `headroom` times the running requests for rows that no request row stands behind
    (quarantined ones, and transfers received into host memory).
    """
    return int(req_to_token_pool.req_to_token.shape[0] + req_to_token_pool.size * headroom)


def bind(queue: DecodePreallocQueue) -> None:
    """Let the request pool know the slot pool beside it, for everyone who only has the former."""
    pool = queue.req_to_metadata_buffer_idx_allocator
    pool.bind(queue)
    queue.req_to_token_pool.metadata_slots = pool


def pool_beside(holder: Any) -> SlotPool | None:
    """The slot pool beside `holder.req_to_token_pool`; None where nothing is received."""
    return getattr(getattr(holder, "req_to_token_pool", None), "metadata_slots", None)


def allocate(queue: DecodePreallocQueue, decode_req: DecodeRequest) -> int | None:
    """Lease a row for the request of `decode_req` and return its index, None when there is none."""
    req = decode_req.req
    held = getattr(req, "metadata_slot", None)
    if held is not None:
        raise SlotError(held.pool.refusal(held, f"second row for {req.rid!r}"))
    slot: Slot | None = queue.req_to_metadata_buffer_idx_allocator.lease(req.rid)
    if slot is None:
        return None
    req.metadata_slot = slot
    return slot.index


def hand_over(req: Req, spec_algorithm: SpeculativeAlgorithm) -> None:
    """Give `req` its committed row if its first step drafts from it; otherwise forget the views.

    Only the EAGLE family builds its first draft from the row (spec_info.py,
    build_disagg_draft_input; before 0.5.13 decode_schedule_batch_mixin.py, process_prebuilt).
    """
    if spec_algorithm.is_eagle():
        req.metadata_slot.hand_over()
    else:
        _forget_views(req)


def leave_queue(decode_req: DecodeRequest, drained: bool = False) -> Verdict:
    """The queue entry lets go of its row.

    A row that passed to the request stays with it. That of a failed request is shut away, unless
    its sender is known to have stopped or to have had its time (`drained`).
    """
    req = decode_req.req
    slot: Slot | None = getattr(req, "metadata_slot", None)
    if slot is None:
        index = decode_req.metadata_buffer_index
        raise SlotError(f"metadata row {index}: second release by {req.rid!r} refused")
    if slot.status is not Status.TRANSFERRING:
        return Verdict.KEPT
    req.metadata_slot = None
    if req.finished() and not drained:
        return slot.abandon()
    return slot.release(by=req.rid)


def drop_queue(pool: SlotPool) -> None:
    """The transfer queue forgets its entries; their senders may still write."""
    pool.abandon_transfers()


def release(req: Req) -> bool:
    """Give back the row that passed to `req`, if it has one; from then on its views are gone.

    A row still being received is the queue entry's to give back.
    """
    slot: Slot | None = getattr(req, "metadata_slot", None)
    if slot is None or slot.status is Status.TRANSFERRING:
        return False
    slot.release(by=req.rid)
    req.metadata_slot = None
    _forget_views(req)
    return True


def _forget_views(req: Req) -> None:
    for field in DRAFT_FIELDS:
        setattr(req, field, None)


def release_after_result(process: Step) -> Step:
    """Decorates Scheduler.process_batch_result: rows read by a prebuilt batch come back after the
    first real result of their requests, and those of a prebuilt batch whose processing failed."""

    @functools.wraps(process)
    def processed(scheduler: Scheduler, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        mode = batch.forward_mode
        try:
            outcome = process(scheduler, batch, *args, **kwargs)
        except Exception:
            if mode.is_prebuilt():
                _release_all(batch.reqs)
            raise
        pool = pool_beside(scheduler)
        real = not (mode.is_prebuilt() or mode.is_idle())
        if real and pool is not None and pool.census[Status.PREBUILT]:
            _release_all(batch.reqs)
        return outcome

    return processed  # type: ignore[return-value]


def release_on_error(step: Step) -> Step:
    """Decorates the step that turns waiting requests into a prebuilt batch: when it fails, the rows
    of the requests that it took out of the waiting queue come back and the error goes on."""

    @functools.wraps(step)
    def guarded(scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
        waiting = scheduler.waiting_queue
        try:
            return step(scheduler, *args, **kwargs)
        except Exception:
            still_waiting = {id(req) for req in scheduler.waiting_queue}
            _release_all([req for req in waiting if id(req) not in still_waiting])
            raise

    return guarded  # type: ignore[return-value]


def _release_all(reqs: list[Req]) -> None:
    for req in reqs:
        release(req)


def check_idle(checker: Any) -> None:
    """Report, in the manner of SGLang's idle check, rows that somebody holds although nothing runs.

    `checker` has `req_to_token_pool` and `count_req_pool_leak_warnings`.
    """
    pool = pool_beside(checker)
    if pool is None or pool.size == pool.census[Status.FREE] + pool.census[Status.QUARANTINED]:
        return
    from sglang.srt.environ import envs
    from sglang.srt.utils.common import raise_error_or_warn

    owners = ", ".join(f"{s.index}: {s.owner!r} ({s.status.value})" for s in pool.held())
    raise_error_or_warn(
        checker,
        envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE.get(),
        "count_req_pool_leak_warnings",
        f"metadata slot leak detected! {len(pool.held())} of {pool.size} rows held: {owners}",
    )


def log_suffix(req_to_token_pool: ReqToTokenPool) -> str:
    """Counts by status for the decode log line; empty where nothing is received."""
    pool: SlotPool | None = getattr(req_to_token_pool, "metadata_slots", None)
    if pool is None:
        return ""
    counts = ", ".join(f"{n} {status}" for status, n in pool.counts().items())
    return f", #metadata-slot: {counts}"


def add_counts(get_internal_state: Step) -> Step:
    """Decorates Scheduler.get_internal_state: the reply carries the counts by status."""

    @functools.wraps(get_internal_state)
    def with_counts(scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
        reply = get_internal_state(scheduler, *args, **kwargs)
        pool = pool_beside(scheduler)
        if pool is not None:
            reply.internal_state["metadata_slots"] = pool.counts()
        return reply

    return with_counts  # type: ignore[return-value]
