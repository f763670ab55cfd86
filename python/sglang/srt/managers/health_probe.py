# SPDX-License-Identifier: Apache-2.0
"""What counts as a health probe in the scheduler, and which probes are answered at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sized
from enum import Enum
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import (
    AbortReq,
    HealthCheckOutput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

RID_PREFIX = "HEALTH_CHECK"  # constants.HEALTH_CHECK_RID_PREFIX, from 0.5.10 on


class Outcome(Enum):
    """What became of a probe."""

    ANSWERED = "answered"
    GENERATED = "generated"
    WITHDRAWN = "withdrawn"


outcomes: Counter[Outcome] = Counter()
"""What became of the probes of this process; a withdrawn one was answered or generated before."""


def is_probe(message: Any) -> bool:
    """Whether `message` asks for at most one token from one, under the id of a health probe.

    Anything else that carries such an id is what its type says, an abort above all (sglang#35896).
    """
    if not isinstance(message, (TokenizedGenerateReqInput, TokenizedEmbeddingReqInput)):
        return False
    if not (message.rid or "").startswith(RID_PREFIX):
        return False
    prompt, limit = message.input_ids, message.sampling_params.max_new_tokens
    return prompt is not None and len(prompt) == 1 and limit is not None and limit <= 1


def answer(scheduler: Scheduler, messages: list[Any]) -> None:
    """Answer the probes in `messages` and take them out, before anything else is looked at.

    `messages`: what this pass of the loop received, changed in place. It is also what the first
    pipeline stage relays, so the other stages never see a probe that was answered. One probe stays
    in it and is generated for real when the server is at rest and nothing but probes came in. A
    `HealthCheckOutput` is the HTTP side asking the loop alone: it goes back as it came.
    """
    outcomes[Outcome.WITHDRAWN] += sum(map(_withdraws_probe, messages))
    asked = [message for message in messages if _asks_for_health(message)]
    if not asked or not scheduler.pp_group.is_first_rank:
        return
    chosen = None
    if len(asked) == len(messages) and at_rest(scheduler):
        chosen = next(filter(is_probe, asked), None)
    outcomes[Outcome.GENERATED] += chosen is not None
    outcomes[Outcome.ANSWERED] += len(asked) - (chosen is not None)
    for message in asked:
        if message is not chosen or _memory_is_held(scheduler):
            _reply(scheduler, message)
    done = {id(message) for message in asked if message is not chosen}
    messages[:] = [message for message in messages if id(message) not in done]


def at_rest(scheduler: Scheduler) -> bool:
    """Whether nothing is running, queued, in transfer, retracted or paused, with memory in place.

    Every rank of a pipeline stage decides for itself, so only what all of them agree on is read:
    batches, queues that change after a vote, and switches set by a broadcast message.
    """
    if scheduler._engine_paused or _released_memory(scheduler) or any(map(len, _queues(scheduler))):
        return False
    if hasattr(scheduler, "is_fully_idle"):  # from 0.5.10 on
        return bool(scheduler.is_fully_idle(for_health_check=True))
    return (
        scheduler._is_no_request()
        and scheduler.chunked_req is None
        and not scheduler.dllm_manager.any_staging_reqs()
    )


def _asks_for_health(message: Any) -> bool:
    """Whether the reply to `message` is that the loop turns: a probe, or the HTTP side's echo."""
    return isinstance(message, HealthCheckOutput) or is_probe(message)


def _withdraws_probe(message: Any) -> bool:
    return isinstance(message, AbortReq) and (message.rid or "").startswith(RID_PREFIX)


def _queues(scheduler: Scheduler) -> Iterator[Sized]:
    """Where a request can be that is in no batch."""
    yield scheduler.waiting_queue
    yield scheduler.grammar_manager.grammar_queue
    if scheduler.disaggregation_mode == DisaggregationMode.PREFILL:
        yield scheduler.disagg_prefill_bootstrap_queue.queue
        yield scheduler.disagg_prefill_inflight_queue
    elif scheduler.disaggregation_mode == DisaggregationMode.DECODE:
        yield scheduler.disagg_decode_prealloc_queue.queue
        yield scheduler.disagg_decode_prealloc_queue.retracted_queue
        yield scheduler.disagg_decode_transfer_queue.queue


def _released_memory(scheduler: Scheduler) -> Sized:
    """What `release_memory_occupation` has given back: tags of weights, KV cache, graphs."""
    owner = scheduler if hasattr(scheduler, "offload_tags") else scheduler.weight_updater
    tags: Sized = owner.offload_tags  # the scheduler's own up to 0.5.12
    return tags


def _memory_is_held(scheduler: Scheduler) -> bool:
    """Whether a server at rest still holds rows or pages, for a dead peer or a copy to the host.

    The real generation may have to wait for them, so its probe is answered before it. Ranks need
    not agree on this: it never decides which requests run.
    """
    return hasattr(scheduler, "is_fully_idle") and not scheduler.is_fully_idle()


def _reply(scheduler: Scheduler, message: Any) -> None:
    """Tell the API worker that sent `message` that the loop turns; off the first rank, nothing."""
    if getattr(scheduler, "rust_server", None) is not None:  # from 0.5.17 on
        scheduler.rust_server.push_health_ack()
        return
    channels = getattr(scheduler, "ipc_channels", scheduler)  # from 0.5.13 on
    channels.send_to_tokenizer.send_output(
        HealthCheckOutput(rid=message.rid, http_worker_ipc=message.http_worker_ipc)
    )
