# SPDX-License-Identifier: Apache-2.0
"""The last chunk of a request always speaks: its aux metadata goes out once, with or without pages.

A sender takes a chunk for the last one when the pages sent so far are the pages due. Whatever makes
the two disagree (a chunk that is dropped because it has no pages, a prefix that ends inside a page)
leaves decode waiting for metadata that never comes, so each of those cases is settled here:

    chunk    pages   what is sent
    middle   none    nothing, and nothing is counted
    middle   some    pages
    last     none    state if there is some, aux
    last     some    pages, state if there is some, aux

NIXL up to 0.5.22 counts a request's chunks on the decode side. A last chunk without pages therefore
says how many chunks came before it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager, TransferInfo
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVSender
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])

# In NIXL's aux notification of a last chunk without pages, `{room}_aux_nokv_{rank}` from 0.5.11.
NO_PAGES = "_nokv_"


# the scheduler's side -----------------------------------------------------------------------


def start(start_idx: int, end_idx: int, last_chunk: bool) -> int:
    """First token to send: a last chunk that begins after its end is empty, not absent."""
    return min(start_idx, end_idx) if last_chunk else start_idx


def concludes(send_kv_chunk: Method) -> Method:
    """Decorate `send_kv_chunk`: a last chunk that its sender takes for a middle one fails."""

    @functools.wraps(send_kv_chunk)
    def send(
        self: Scheduler, req: Req, last_chunk: bool = False, end_idx: int | None = None
    ) -> None:
        send_kv_chunk(self, req, last_chunk=last_chunk, end_idx=end_idx)
        if last_chunk:
            _check_counts(req)

    return send  # type: ignore[return-value]


def _check_counts(req: Req) -> None:
    sender = req.disagg_kv_sender
    sent, due = getattr(sender, "curr_idx", None), getattr(sender, "num_kv_indices", None)
    if sent is None or due is None or sent == due or not _is_live(sender):
        return
    fail(
        sender,
        f"Request {req.rid}: the last chunk left the sender at {sent} of {due} pages, so its "
        f"metadata cannot be sent; sending began at token {req.start_send_idx} of "
        f"{len(req.origin_input_ids)} prompt tokens.",
    )


def _is_live(sender: CommonKVSender) -> bool:
    """Whether the transfer has neither failed nor been cleared."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    statuses = sender.kv_mgr.request_status
    concluded = getattr(sender, "conclude_state", None) == KVPoll.Failed
    return not concluded and statuses.get(sender.bootstrap_room, KVPoll.Failed) != KVPoll.Failed


def fail(sender: CommonKVSender, reason: str) -> None:
    """Fail a transfer on both ends, as far as the release has a way to tell decode."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    manager: CommonKVManager = sender.kv_mgr
    room = sender.bootstrap_room
    logger.error(reason)
    if conclude := getattr(manager, "conclude_failure", None):  # 0.5.20
        conclude(bootstrap_room=room, failure_reason=reason)
        return
    manager.record_failure(room, reason)
    manager.update_status(room, KVPoll.Failed)
    infos = list(manager.transfer_infos.get(room, {}).values())
    if notify := getattr(manager, "notify_decode_status", None):  # mori
        notify(infos, room, KVPoll.Failed, reason)
    elif sync := getattr(manager, "sync_status_to_decode_endpoint", None):  # mooncake, ascend
        for info in infos:
            if not info.is_dummy:
                sync(info.endpoint, info.dst_port, room, KVPoll.Failed, 0)


# senders ------------------------------------------------------------------------------------


def is_empty_middle(pages: Sequence[int], is_last: bool) -> bool:
    """Whether a chunk has nothing to say; context parallelism may leave a rank without pages."""
    return len(pages) == 0 and not is_last


def skips_empty_middle(prepare: Method) -> Method:
    """Decorate `_prepare_send_indices`: a middle chunk that is empty on this rank is skipped."""

    @functools.wraps(prepare)
    def prepared(*args: Any, **kwargs: Any) -> tuple[Any, slice, bool, bool]:
        pages, index_slice, is_last, skip = prepare(*args, **kwargs)
        return pages, index_slice, is_last, skip or is_empty_middle(pages, is_last)

    return prepared  # type: ignore[return-value]


# mooncake, ascend ---------------------------------------------------------------------------


def keeps_state_result(maybe_send_extra: Method) -> Method:
    """Decorate `maybe_send_extra`: remember on the destination whether its state arrived."""

    @functools.wraps(maybe_send_extra)
    def send(self: MooncakeKVManager, req: TransferInfo, *args: Any, **kwargs: Any) -> int:
        result: int = maybe_send_extra(self, req, *args, **kwargs) or 0
        req.state_result = result
        return result

    return send  # type: ignore[return-value]


def follows_state(send_aux: Method) -> Method:
    """Decorate `send_aux`: no metadata for a destination whose state did not arrive."""

    @functools.wraps(send_aux)
    def send(self: MooncakeKVManager, req: TransferInfo, *args: Any, **kwargs: Any) -> Any:
        failed: int = getattr(req, "state_result", 0)
        if not failed:
            return send_aux(self, req, *args, **kwargs)
        reason = f"Failed to send the state of room {req.room} to {req.endpoint}:{req.dst_port}"
        logger.error(reason)
        self.record_failure(req.room, reason)
        return failed

    return send  # type: ignore[return-value]


def without_device_pages(send_kvcache: Method) -> Method:
    """Decorate Ascend's `send_kvcache`: 0.5.17 hands it an argument that it does not take.

    HiSparse alone gives it a value, and Ascend does not serve that.
    """

    @functools.wraps(send_kvcache)
    def send(*args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("dst_device_kv_indices", None) is not None:
            raise NotImplementedError("Ascend transfers no HiSparse KV: start decode without it.")
        return send_kvcache(*args, **kwargs)

    return send  # type: ignore[return-value]


# NIXL ---------------------------------------------------------------------------------------


def announces_empty(send_kvcache: Method) -> Method:
    """Decorate `send_kvcache` and its slice form: a chunk without pages is a notification alone."""

    @functools.wraps(send_kvcache)
    def send(
        self: NixlKVManager,
        peer_name: str,
        pages: Sequence[int],
        dst_ptrs: Any,
        dst_pages: Any,
        dst_gpu_id: int,
        notif: str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if len(pages) == 0:
            self.agent.send_notif(peer_name, notif.encode())
            return None
        return send_kvcache(
            self, peer_name, pages, dst_ptrs, dst_pages, dst_gpu_id, notif, *args, **kwargs
        )

    return send  # type: ignore[return-value]


def posted_only(add_transfer_request: Method) -> Method:
    """Decorate `add_transfer_request`: what posted no transfer has no handle to wait for."""

    @functools.wraps(add_transfer_request)
    def add(*args: Any, **kwargs: Any) -> list[Any]:
        handles = add_transfer_request(*args, **kwargs)
        return [handle for handle in handles if handle is not None]

    return add  # type: ignore[return-value]


def fails_transfer(send: Method) -> Method:
    """Decorate a sender's `send` and `poll`: an error of a transfer fails it, not the server."""

    @functools.wraps(send)
    def guarded(self: NixlKVSender, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.disaggregation.base.conn import KVPoll

        if getattr(self, "failed", False):
            return KVPoll.Failed
        try:
            return send(self, *args, **kwargs)
        except Exception:
            logger.exception(f"NIXL transfer of room {self.bootstrap_room} failed")
            self.failed = True
            for table in (self.kv_mgr.transfer_infos, self.kv_mgr.request_status):
                table.pop(self.bootstrap_room, None)
            return KVPoll.Failed

    return guarded  # type: ignore[return-value]


def skips_empty_state(maybe_send_extra: Method) -> Method:
    """Decorate `maybe_send_extra`: state without indices is not handed to the transport."""

    @functools.wraps(maybe_send_extra)
    def send(
        self: NixlKVManager, peer_name: str, state_indices: Sequence[int], *args: Any, **kwargs: Any
    ) -> Any:
        if len(state_indices) == 0:
            return None
        return maybe_send_extra(self, peer_name, state_indices, *args, **kwargs)

    return send  # type: ignore[return-value]


def expects_state(state_indices: Sequence[Any] | None) -> bool:
    """Whether decode has to wait for state: prefill skips a component that has no indices.

    Args:
        state_indices: None, one flat list (up to 0.5.11), or one list or None per component.
    """
    if state_indices is None or len(state_indices) == 0:
        return False
    return any(_size(indices) for indices in state_indices)


def _size(indices: Any) -> int:
    if indices is None:
        return 0
    return len(indices) if hasattr(indices, "__len__") else 1


def counted(notif: str, chunk_id: int) -> str:
    """Aux notification of a last chunk; one without pages carries how many chunks came before."""
    return f"{notif}_{chunk_id}" if NO_PAGES in notif else notif


def chunks_before(components: Sequence[str]) -> int:
    """How many chunks came before a last one without pages: `room, aux, nokv, rank[, count]`."""
    return int(components[4]) if len(components) > 4 else 0
