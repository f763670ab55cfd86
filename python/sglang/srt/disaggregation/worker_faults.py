# SPDX-License-Identifier: Apache-2.0
"""What a peer sends may fail its request, never the thread or the loop that reads it.

Mooncake's threads serve all requests: one takes in what decode says, some write KV, one hears of
finished transfers. Stock ends a thread at the first exception, and nothing looks at threads: the
server stays healthy and finishes nothing any more.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import zmq

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager, TransferKVChunk

logger = logging.getLogger(__name__)

CLOSED = {zmq.ETERM, zmq.ENOTSOCK}
"""The thread's own socket is gone: the server ends, or takes another role."""


def surviving(read: Callable[[], None]) -> Callable[[], None]:
    """Wrap a thread's loop over messages: one that cannot be handled is dropped, the rest is read.

    What was received is consumed, and the loop keeps nothing between messages, so it is entered
    again. The request that the message belonged to runs into its own time limit.
    """

    @functools.wraps(read)
    def reading() -> None:
        while True:
            try:
                return read()
            except zmq.ZMQError as error:
                if error.errno in CLOSED:
                    raise
                logger.exception("%s: a message is dropped", read.__name__)
            except Exception:
                logger.exception("%s: a message is dropped", read.__name__)

    return reading


def connect(peer: zmq.Socket[bytes], address: str) -> None:
    """Connect to a decode server; a socket that does not reach it is given up as one that lost it.

    SGLang looks at its monitor before each message, and hears of lost connections alone. A socket
    without a peer takes a thousand messages, and then keeps the thread for 30 s with each. The
    monitor is made here: who is refused at once is refused before SGLang makes one.
    """
    peer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)  # SGLang gets the same one
    peer.connect(address)


class _Noted:
    """A worker's queue that remembers what was last taken out of it."""

    def __init__(self, queue: Any) -> None:
        self.queue, self.last = queue, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue, name)

    def get(self) -> Any:
        self.last = None  # waiting: whatever ends this belongs to no chunk
        self.last = self.queue.get()
        return self.last


def goes_on(work: Callable[..., None]) -> Callable[..., None]:
    """Decorate `MooncakeKVManager.transfer_worker`: a chunk that it ends on fails its request.

    The worker keeps nothing between chunks that it cannot make again, so it is entered again.
    """

    @functools.wraps(work)
    def working(manager: MooncakeKVManager, queue: Any, *args: Any, **kwargs: Any) -> None:
        noted = _Noted(queue)
        while True:
            try:
                return work(manager, noted, *args, **kwargs)
            except Exception as error:
                if noted.last is None:
                    raise
                # stock wraps what went wrong in an error that says the server is dead
                fail_transfer(manager, noted.last, error.__context__ or error)

    return working


def fail_transfer(manager: MooncakeKVManager, chunk: TransferKVChunk, error: BaseException) -> None:
    """Fail the one request that a transfer thread stumbled over, on both ends."""
    reason = f"prefill cannot transfer KV to this decode server: {type(error).__name__}: {error}"
    logger.error("Room %s: %s", chunk.room, reason, exc_info=error)
    try:
        _conclude(manager, chunk.room, reason)
    except Exception:
        logger.exception("Room %s: decode could not be told", chunk.room)
    manager.transfer_infos.pop(chunk.room, None)
    for name in ("req_to_decode_prefix_len", "_staging_outstanding"):  # as after the last chunk
        getattr(manager, name, {}).pop(chunk.room, None)


def fail_handshake(entry: DecodeRequest, status: int) -> None:
    """Fail a request whose transfer is said to be in a state that it cannot have been in yet."""
    from sglang.srt.disaggregation.utils import prepare_abort

    message = (
        f"prefill says that the transfer of room {entry.req.bootstrap_room} is in state {status} "
        "before decode has asked for it: the room is in use for something else"
    )
    logger.error("%s (request %s)", message, entry.req.rid)
    entry.kv_receiver.abort()
    prepare_abort(entry.req, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)


def _conclude(manager: Any, room: int, reason: str) -> None:
    """Mark a room failed and tell decode, in the way the release has for it."""
    if hasattr(manager, "conclude_failure"):  # from 0.5.20 on
        manager.conclude_failure(bootstrap_room=room, failure_reason=reason)
        return
    from sglang.srt.disaggregation.base.conn import KVPoll

    if room not in manager.request_status:  # over already, nobody to tell
        return
    manager.record_failure(room, reason)
    manager.update_status(room, KVPoll.Failed)
    for info in list(manager.transfer_infos.get(room, {}).values()):
        if not info.is_dummy:
            manager.sync_status_to_decode_endpoint(
                info.endpoint, info.dst_port, info.room, KVPoll.Failed, manager.attn_tp_rank
            )
