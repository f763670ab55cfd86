# SPDX-License-Identifier: Apache-2.0
"""Nothing that is known by a room outlives the request whose room it is.

The managers of both ends keep tables by room: states, destinations, failures. Senders and receivers
clear them when they end, but the threads that read messages write into them as well, and a message
may come when its request is over. The loop sweeps what belongs to no sender or receiver.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import BaseKVManager
    from sglang.srt.managers.scheduler import Scheduler

TABLES = (
    "request_status",
    "transfer_infos",
    "req_to_decode_prefix_len",
    "failure_records",
    "required_prefill_response_num_table",
    "prefill_response_tracker",
    "transfer_statuses",  # NIXL
    "room_to_bootstrap_addr",  # MORI
)
"""Dicts by room of the managers; which of them there are depends on end and backend."""
SWEEP_S = 2.0
OVER_S = 10.0
"""Longest that a message under way, or the end of a request, needs an entry that nobody owns."""
EARLY_S = 300.0
"""SGLang's default for how long one end waits for the other."""


@dataclass
class RoomTables:
    """Who owns the rooms of a manager, and since when a room has had no owner.

    An owner is a sender or receiver that lives and is not concluded. Made, asked and swept by the
    scheduler's loop alone; other threads only add to the manager's tables.
    """

    owners: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    since: dict[int, float] = field(default_factory=dict)
    due: float = field(default_factory=lambda: time.monotonic() + SWEEP_S)

    @classmethod
    def of(cls, manager: BaseKVManager) -> RoomTables:
        """The one of a manager, made once."""
        made: RoomTables = vars(manager).setdefault("room_tables", cls())
        return made

    def owned(self) -> set[int]:
        """Rooms of requests under way."""
        return {
            each.bootstrap_room
            for each in self.owners
            if getattr(each, "conclude_state", None) is None
        }

    def forget(self, manager: BaseKVManager, now: float) -> set[int]:
        """Take the rooms that have had no owner for long enough out of all tables."""
        unowned = known(manager) - self.owned()
        self.since = {room: self.since.get(room, now) for room in unowned}
        over = {
            room for room, since in self.since.items() if now - since >= _patience(manager, room)
        }
        for table in _tables(manager):
            for room in over:
                table.pop(room, None)
        _leave_addresses(manager, over)
        for room in over:
            del self.since[room]
        return over


def own(manager: BaseKVManager, owner: Any) -> Any:
    """Note the sender or receiver that was just made; returns it.

    The stand-in that a warm-up or a health probe gets has no room, and no table knows of it.
    """
    if getattr(owner, "bootstrap_room", None) is not None:
        RoomTables.of(manager).owners.add(owner)
    return owner


def sweep(manager: BaseKVManager) -> None:
    """Called in every pass of the loop; looks at the tables once in SWEEP_S seconds."""
    tables, now = RoomTables.of(manager), time.monotonic()
    if now >= tables.due:
        tables.due = now + SWEEP_S
        tables.forget(manager, now)


def known(manager: BaseKVManager) -> set[int]:
    """All rooms that a manager has an entry of, whoever owns them."""
    rooms: set[int] = set()
    for table in _tables(manager):
        if isinstance(table, dict):  # a pipeline's replicated table has the same rooms
            rooms.update(list(table))  # one step: other threads add meanwhile
    for rooms_there in list(getattr(manager, "addr_to_rooms_tracker", {}).values()):
        rooms.update(list(rooms_there))
    return rooms


def counted(scheduler: Scheduler, reply: Any) -> Any:
    """Add the number of rooms in the tables to the internal state of a reply; returns it.

    `known`: with an entry anywhere; `owned`: of requests under way. Both are 0 when idle.
    """
    manager = _manager_of(scheduler)
    if manager is not None:
        owned = RoomTables.of(manager).owned()
        reply.internal_state["rooms"] = {"known": len(known(manager)), "owned": len(owned)}
    return reply


def _patience(manager: BaseKVManager, room: int) -> float:
    """Seconds for which a room may have no owner.

    Decode's message may be at prefill before the request itself; then the owner is still to come.
    """
    from sglang.srt.disaggregation.base.conn import KVPoll

    status = getattr(manager, "request_status", {}).get(room)
    if room in getattr(manager, "transfer_infos", ()) and status != KVPoll.Failed:
        return float(getattr(manager, "bootstrap_timeout", EARLY_S))
    return OVER_S


def _tables(manager: BaseKVManager) -> list[Any]:
    return [table for name in TABLES if (table := getattr(manager, name, None)) is not None]


def _leave_addresses(manager: BaseKVManager, over: set[int]) -> None:
    """Take rooms out of the lists by address of prefill, and addresses without rooms with them."""
    by_address = getattr(manager, "addr_to_rooms_tracker", {})
    for address, rooms in list(by_address.items()):
        rooms -= over
        if not rooms:
            by_address.pop(address, None)


def _manager_of(scheduler: Scheduler) -> BaseKVManager | None:
    for name in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        queue = getattr(scheduler, name, None)
        if queue is not None:
            return queue.kv_manager
    return None
