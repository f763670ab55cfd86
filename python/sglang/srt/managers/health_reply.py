# SPDX-License-Identifier: Apache-2.0
"""How a health endpoint waits for the reply to its probe, and takes back an unanswered one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import AbortReq, HealthCheckOutput

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

LOOK_S = 1.001
"""Seconds a probe without a reply waits before the next look at it. A hair over stock's one second,
so that as many looks as the limit has seconds end after it, and not just before with one to go."""

_probes: dict[str, Probe] = {}
"""The probes of this process that are waiting, by request id."""


class Status(Enum):
    """How far a probe has come."""

    SENT = "sent"
    """The one-token request is out."""
    INSISTED = "insisted"
    """The loop itself has been asked as well, because the request may be held up."""
    PROVEN = "proven"
    """The loop answered, the request may still be held up."""
    ANSWERED = "answered"
    """The request was answered; nothing of it is left in the scheduler."""


@dataclass
class Probe:
    """One health probe, from the request to the reply or the withdrawal.

    The scheduler replies to the id it was asked about, so a message that was on its way when the
    loop stopped is no reply to a probe sent since (sglang#6624).
    """

    manager: TokenizerManager
    rid: str
    status: Status = Status.SENT
    sent_at: float = field(default_factory=time.time)
    replied: asyncio.Event = field(default_factory=asyncio.Event)
    generation: asyncio.Task[None] | None = None

    def insist(self) -> bool:
        """Ask the loop itself, once, with a message that it sends back; whether that was new."""
        if self.status is not Status.SENT:
            return False
        self.status = Status.INSISTED
        _dispatch(self.manager, HealthCheckOutput(rid=self.rid))
        return True

    def answer(self) -> bool:
        """Note a reply; whether it is the first."""
        if self.replied.is_set():
            return False
        self.status = Status.ANSWERED if self.status is Status.SENT else Status.PROVEN
        self.replied.set()
        return True

    def cancel(self) -> bool:
        """End the probe; whether its request had to be withdrawn from the scheduler."""
        _probes.pop(self.rid, None)
        if self.generation is not None:
            self.generation.cancel()
        if self.status is Status.ANSWERED:
            return False
        _dispatch(self.manager, AbortReq(rid=self.rid))
        return True


def send(
    manager: TokenizerManager,
    request: GenerateReqInput | EmbeddingReqInput,
    generation: Coroutine[Any, Any, None],
) -> Probe:
    """Send the probe `request`, whose output `generation` waits for.

    Where a request would wait in this process, only the loop is asked, and nothing generated.
    """
    probe = _probes[request.rid] = Probe(manager, request.rid)
    if _holds_requests(manager):
        generation.close()
        manager.auto_create_handle_loop()
        probe.insist()
    else:
        probe.generation = asyncio.create_task(_generate(probe, generation))
    return probe


async def look(probe: Probe) -> None:
    """Wait for the reply, at most `LOOK_S` seconds.

    A probe held up for that long by a pause, or while the server sends replies to others, asks the
    loop itself: their messages alone do not show that it still turns. A server that sends nothing
    is left to its generation.
    """
    try:
        await asyncio.wait_for(probe.replied.wait(), LOOK_S)
    except asyncio.TimeoutError:
        if _holds_requests(probe.manager) or probe.manager.last_receive_tstamp > probe.sent_at:
            probe.insist()


def arrived(probe: Probe) -> bool:
    """Whether the scheduler has replied to this probe."""
    return probe.replied.is_set()


def received(message: Any) -> None:
    """Note `message` from the scheduler or detokenizer as the reply to the probes it names.

    Called for every message; costs one look at an empty dictionary unless a probe is waiting.
    """
    if not _probes:
        return
    named = getattr(message, "rids", None) or [getattr(message, "rid", None)]
    for probe in [probe for rid, probe in _probes.items() if rid in named]:
        probe.answer()


async def _generate(probe: Probe, generation: Coroutine[Any, Any, None]) -> None:
    """Wait for the generated token; a request that came to nothing leaves its probe waiting."""
    try:
        await generation
    except Exception as error:
        logger.warning("Health probe %s was not generated: %s", probe.rid, error)
    else:
        probe.answer()


def _holds_requests(manager: TokenizerManager) -> bool:
    """Whether a request would wait here: generation is paused, or a weight update has its turn."""
    lock = manager.model_update_lock
    return bool(manager.is_pause or lock._writer_active or lock._waiting_writers)


def _dispatch(manager: TokenizerManager, message: AbortReq | HealthCheckOutput) -> None:
    """Send a message to the scheduler, under the name of this API worker."""
    if hasattr(manager, "_dispatch_to_scheduler"):  # from 0.5.15 on
        manager._dispatch_to_scheduler(message)
    else:
        manager.send_to_scheduler.send_pyobj(message)
