# SPDX-License-Identifier: Apache-2.0
"""Two threads that tell the status of one room never undo each other.

A manager's `update_status` reads what is known of a room and writes what follows from it. The loop
tells it that a request has come, the threads that read messages that the peer is ready, or that it
has failed. Who writes between the other's read and write is unheard: the request waits for what has
happened already, on both ends, until its time is over.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, TypeVar

from sglang.srt.disaggregation.base.conn import KVPoll

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import BaseKVManager

Manager = TypeVar("Manager", bound="type[BaseKVManager]")


def whole(manager_class: Manager) -> Manager:
    """Decorates a class of managers: each makes one update after the other.

    From 0.5.22 on a failure under `deferred_bootstrap` tells the peer before it returns. It is let
    through, for it reads nothing that it could undo, and would keep the others waiting for a peer
    that may be gone.
    """
    update = manager_class.update_status

    @functools.wraps(update)
    def update_status(manager: BaseKVManager, bootstrap_room: int, status: KVPoll) -> None:
        if status == KVPoll.Failed and getattr(manager, "deferred_bootstrap", None) is not None:
            update(manager, bootstrap_room, status)
            return
        with _lock_of(manager):
            update(manager, bootstrap_room, status)

    manager_class.update_status = update_status
    return manager_class


def _lock_of(manager: BaseKVManager) -> threading.Lock:
    known = vars(manager)
    if "room_status_lock" not in known:
        known.setdefault("room_status_lock", threading.Lock())  # one step for all threads
    own: threading.Lock = known["room_status_lock"]
    return own
