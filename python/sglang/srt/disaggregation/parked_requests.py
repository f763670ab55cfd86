# SPDX-License-Identifier: Apache-2.0
"""A pass over a long queue looks at the requests that something can have happened to.

Every pass asks each queued request for its status, walks over all of them and makes the list anew,
although with thousands queued nearly all still wait for their peer. Transfer threads now note the
room whose status they set. A pass asks those alone, and hands SGLang's own code the requests that
are not waiting, in their order, as if they were the whole queue.
"""

from __future__ import annotations

import functools
import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from sglang.srt.disaggregation.base.conn import KVPoll

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue

Method = TypeVar("Method", bound=Callable[..., Any])

# Below, a pass over all of them costs less than knowing whom to leave out.
FEW = 32
# Time limits of a request, and whatever sets a status past the manager, are noticed this late.
FULL_LOOK_SECONDS = 0.25
# Modules whose `poll` says what the manager's table says, and when a time limit is over.
TABLE_POLLS = (
    "sglang.srt.disaggregation.common.conn",
    "sglang.srt.disaggregation.mooncake.conn",
)


def noting(update_status: Method) -> Method:
    """Decorates CommonKVManager.update_status: watchers learn the room, after it is set."""

    @functools.wraps(update_status)
    def updated(manager: CommonKVManager, bootstrap_room: int, status: KVPoll) -> None:
        update_status(manager, bootstrap_room, status)
        for journal in getattr(manager, "journals", ()):
            journal.append(bootstrap_room)

    return updated  # type: ignore[return-value]


@dataclass(eq=False, slots=True)
class Watch:
    """What a queue's requests said when they were last asked.

    `quiet`: statuses in which a request needs no look. `groups`: ranks that decide together; they
    see the smallest of what each of them was told, as in SGLang's own vote.
    """

    poller: Callable[[Any], Any]
    quiet: frozenset[int]
    groups: Sequence[torch.distributed.ProcessGroup]
    journal: deque[int] = field(default_factory=deque)
    entries: list[Any] = field(default_factory=list)
    polls: list[int] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)  # in `entries`, by room
    agreed: list[int] = field(default_factory=list)
    astir: list[int] = field(default_factory=list)  # places: thousands of pairs would be collected
    unready: int = 0  # of those that are astir
    next_full_look: float = 0.0

    def look(self, queue: list[Any]) -> Iterator[tuple[Any, int]]:
        """The requests of `queue` that are not waiting for their peer, in order, and their status.

        The same on all ranks: what each rank knows by itself goes through the vote.
        """
        if self._ask(queue) or self.groups:
            self.agreed = _smallest(self.polls, self.groups)
            self.astir = [at for at, poll in enumerate(self.agreed) if poll not in self.quiet]
            self.unready = sum(self.agreed[at] != READY for at in self.astir)
        return ((queue[at], self.agreed[at]) for at in self.astir)

    def forget(self) -> None:
        """Ask everybody the next time."""
        self.journal.clear()
        self.next_full_look = 0.0

    def _ask(self, queue: list[Any]) -> bool:
        """Ask whoever is new or was noted, now and then everybody; False when nobody was asked."""
        now = time.monotonic()
        everybody = now >= self.next_full_look
        same = len(queue) == len(self.entries) and all(map(operator.is_, queue, self.entries))
        if everybody:
            self.next_full_look = now + FULL_LOOK_SECONDS
            self._take_over(queue, {})
        elif not same:
            self._take_over(queue, dict(zip(map(id, self.entries), self.polls, strict=True)))
        news = everybody or not same
        for room in {self.journal.popleft() for _ in range(len(self.journal))}:
            place = self.places.get(room)
            if place is not None:
                poll = int(self.poller(queue[place]).poll())
                news |= poll != self.polls[place]
                self.polls[place] = poll
        return news

    def _take_over(self, queue: list[Any], known: dict[int, int]) -> None:
        """Remember `queue`; ask those whose status is not `known` by their entry's id."""
        pollers = [self.poller(entry) for entry in queue]
        self.polls = [
            int(poller.poll()) if (poll := known.get(id(entry))) is None else poll
            for entry, poller in zip(queue, pollers, strict=True)
        ]
        self.entries = list(queue)
        self.places = {poller.bootstrap_room: place for place, poller in enumerate(pollers)}


def _smallest(polls: list[int], groups: Sequence[torch.distributed.ProcessGroup]) -> list[int]:
    """The smallest status of each request among the ranks of all `groups`."""
    if not groups:
        return polls
    votes = torch.tensor(polls, dtype=torch.int32)
    for group in groups:
        torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MIN, group=group)
    agreed: list[int] = votes.tolist()
    return agreed


def _ranks(*groups: torch.distributed.ProcessGroup) -> list[torch.distributed.ProcessGroup]:
    """The groups with more than one rank; none before the ranks know each other."""
    dist = torch.distributed
    if not dist.is_initialized():
        return []
    return [group for group in groups if dist.get_world_size(group) > 1]


def _watch(queue: Any, make: Callable[[], Watch]) -> Watch | None:
    """The queue's watch; None when there are few in it, or the backend keeps no such table."""
    watch: Watch | None = getattr(queue, "watch", None)
    if len(queue.queue) < FEW:
        if watch is not None:
            watch.forget()
        return None
    if watch is None:
        watch = make()
        poller = watch.poller(queue.queue[0])
        if type(poller).poll.__module__ not in TABLE_POLLS:
            return None
        manager = poller.kv_mgr
        manager.journals = [*getattr(manager, "journals", ()), watch.journal]
        queue.watch = watch
    return watch


def _with_only(queue: Any, shown: list[Any], step: Callable[[], Any]) -> Any:
    """Run `step` with `shown` as the whole queue; what it takes out or puts in is so for good."""
    whole, queue.queue = queue.queue, shown
    before = set(map(id, shown))
    try:
        return step()
    finally:
        gone = before.difference(map(id, queue.queue))
        added = [entry for entry in queue.queue if id(entry) not in before]
        if gone:
            whole = [entry for entry in whole if id(entry) not in gone]
        queue.queue = whole + added if added else whole


# queues -------------------------------------------------------------------------------------

HANDSHAKE = frozenset({int(KVPoll.Bootstrapping)})
TRANSFER = HANDSHAKE | {int(KVPoll.WaitingForInput), int(KVPoll.Transferring)}
READY = int(KVPoll.WaitingForInput)


def ready_to_allocate(pop_preallocated: Method) -> Method:
    """Decorates DecodePreallocQueue.pop_preallocated.

    It admits in order and stops at the first that does not fit: of those whose prefill is ready it
    needs one more than there are rows.
    """

    @functools.wraps(pop_preallocated)
    def popped(queue: DecodePreallocQueue, *args: Any, **kwargs: Any) -> Any:
        def step() -> Any:
            return pop_preallocated(queue, *args, **kwargs)

        if args or kwargs or queue.pending_reqs or _out_of_order(queue.scheduler):
            return step()
        watch = _watch(queue, lambda: Watch(_receiver, HANDSHAKE, _ranks(queue.gloo_group)))
        if watch is None:
            return step()
        rows = min(
            queue.req_to_token_pool.available_size(),
            queue.req_to_metadata_buffer_idx_allocator.available_size(),
        )
        return _with_only(queue, _first(rows + 1, watch, queue.queue), step)

    return popped  # type: ignore[return-value]


def ready_to_commit(pop_transferred: Method) -> Method:
    """Decorates DecodeTransferQueue.pop_transferred: it needs those whose transfer has ended."""

    @functools.wraps(pop_transferred)
    def popped(queue: DecodeTransferQueue, *args: Any, **kwargs: Any) -> Any:
        def step() -> Any:
            return pop_transferred(queue, *args, **kwargs)

        if args or kwargs or _has_other_news(queue):
            return step()
        watch = _watch(queue, lambda: Watch(_receiver, TRANSFER, _ranks(queue.gloo_group)))
        if watch is None:
            return step()
        return _with_only(queue, [entry for entry, _ in watch.look(queue.queue)], step)

    return popped  # type: ignore[return-value]


def ready_to_prefill(pop_bootstrapped: Method) -> Method:
    """Decorates PrefillBootstrapQueue.pop_bootstrapped: of those whose decode has sent its side,
    it can take as many as there are metadata rows, and those that have one."""

    @functools.wraps(pop_bootstrapped)
    def popped(queue: PrefillBootstrapQueue, *args: Any, **kwargs: Any) -> Any:
        def step() -> Any:
            return pop_bootstrapped(queue, *args, **kwargs)

        scheduler = queue.scheduler
        if args or kwargs or queue.pp_size > 1 or _prefills_early(scheduler):
            return step()
        groups = (scheduler.attn_tp_cpu_group, scheduler.attn_cp_cpu_group)
        watch = _watch(queue, lambda: Watch(_sender, HANDSHAKE, _ranks(*groups)))
        if watch is None:
            return step()
        rows = queue.req_to_metadata_buffer_idx_allocator.available_size()
        return _with_only(queue, _first(rows + 1, watch, queue.queue, _has_row), step)

    return popped  # type: ignore[return-value]


def _first(
    limit: int, watch: Watch, queue: list[Any], exempt: Callable[[Any], bool] | None = None
) -> list[Any]:
    """All that are astir but those that are ready and come after the first `limit` of them."""
    shown = []
    astir, unready = watch.look(queue), watch.unready
    for entry, poll in astir:
        if poll != READY:
            unready -= 1
        elif exempt is None or not exempt(entry):
            if limit > 0:
                limit -= 1
            elif exempt is None and not unready:
                break  # all that follow are ready as well
            else:
                continue
        shown.append(entry)
    return shown


def _receiver(entry: Any) -> Any:
    return entry.kv_receiver


def _sender(req: Any) -> Any:
    return req.disagg_kv_sender


def _has_row(req: Any) -> bool:
    return bool(req.metadata_buffer_index >= 0)


def _out_of_order(scheduler: Any) -> bool:
    """Whether admission is not simply one after the other, or is decided with other stages."""
    return bool(
        scheduler.server_args.pp_size > 1
        or scheduler.server_args.enable_priority_scheduling
        or getattr(scheduler, "enable_lora", False)
    )


def _has_other_news(queue: DecodeTransferQueue) -> bool:
    """Whether more than the manager's table decides when a transfer has ended."""
    return bool(
        getattr(queue, "enable_staging", False)
        or getattr(queue, "enable_host_receive", False)
        or getattr(queue.scheduler, "enable_decode_hicache", False)
    )


def _prefills_early(scheduler: Any) -> bool:
    """Whether a request may be prefilled before decode has sent its side."""
    given = scheduler.server_args
    return bool(
        getattr(given, "optimistic_prefill_attempts", 0)
        or getattr(given, "optimistic_prefill_retries", 0)
        or getattr(given, "disaggregation_decode_allocation_policy", "early") != "early"
    )
