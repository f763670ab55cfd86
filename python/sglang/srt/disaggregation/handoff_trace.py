# SPDX-License-Identifier: Apache-2.0
"""What happens to each request on its way from prefill to first decode, as a trace to look at.

Off unless SGLANG_HANDOFF_TRACE names a directory; then every scheduler process keeps its latest
transitions in a ring and writes them to one file there, in the Trace Event Format that Perfetto and
chrome://tracing open, whenever its internal state is asked for (GET /server_info).
"""

from __future__ import annotations

import enum
import functools
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

logger = logging.getLogger(__name__)
Method = TypeVar("Method", bound=Callable[..., Any])

DIRECTORY = "SGLANG_HANDOFF_TRACE"
CAPACITY = "SGLANG_HANDOFF_TRACE_TRANSITIONS"
DEFAULT_CAPACITY = 20_000  # about 4 MB of memory, 1,500 requests
# A server that is never at rest writes no more often, for writing takes tens of milliseconds.
WRITE_INTERVAL_NS = 10_000_000_000
PAGE_RUNS = 8  # of page numbers told per transition
FLOW = "handoff"


class Step(enum.Enum):
    """Where a request is. Each step lasts until the next one begins."""

    BOOTSTRAP = "bootstrap"  # the two ends shake hands
    QUEUE = "queue"  # prefill: waits for a batch, longer than a pass of the loop
    PREFILL = "prefill"  # prefill: in a batch, chunks may be on their way
    PREALLOC = "prealloc"  # decode: waits for a request row, KV and a metadata row
    TRANSFER = "transfer"  # prefill: the last chunk is sent; decode: the KV arrives
    COMMIT = "commit"  # decode: its metadata row is read
    WAIT = "wait"  # decode: waits for a place in the batch
    PREBUILT = "prebuilt"  # decode: in the batch that stands for its prefill
    FIRST_DECODE = "first decode"  # decode: in its first real batch (after each resume, too)
    DECODE = "decode"
    RETRACT = "retract"  # decode: gave its KV up, waits for memory
    RESUME = "resume"  # decode: has its KV back, waits for a place in the batch
    FINISH = "finish"


class Transition(NamedTuple):
    """A request enters a step. `ns` is monotonic; `facts` is who owns what at that moment."""

    ns: int
    rid: str
    room: int
    step: Step
    facts: dict[str, Any]


@dataclass
class Live:
    """A request that has not finished, and the step that it is in."""

    req: Req
    step: Step


@dataclass
class Trace:
    """The transitions of one scheduler process, the latest `capacity` of them."""

    role: str
    directory: Path
    capacity: int
    request_rows: ReqToTokenPool
    page_size: int
    live: dict[str, Live] = field(default_factory=dict)
    resulted: list[Req] = field(default_factory=list)
    entered: int = 0
    written: int = 0
    written_ns: int = 0

    def __post_init__(self) -> None:
        self.ring: deque[Transition] = deque(maxlen=self.capacity)
        # Monotonic times of several machines differ; those of the wall clock hardly do.
        self.epoch_ns = time.time_ns() - time.monotonic_ns()

    @property
    def file(self) -> Path:
        return self.directory / f"handoff-{self.role}-{os.getpid()}.json"

    def enter(self, req: Req, step: Step) -> None:
        """Note that `req` is in `step` from now on; nothing when it already was."""
        known = self.live.get(req.rid)
        if step is (Step.FINISH if known is None else known.step):
            return
        if known is not None:
            known.step = step
        else:
            if len(self.live) >= self.capacity:  # they left in a way that nobody noted
                del self.live[next(iter(self.live))]
            self.live[req.rid] = Live(req, step)
        if step is Step.FINISH:
            del self.live[req.rid]
        self.entered += 1
        room = getattr(req, "bootstrap_room", None) or 0
        facts = self.owned(req) | (_end(req) if step is Step.FINISH else {})
        self.ring.append(Transition(time.monotonic_ns(), req.rid, room, step, facts))

    def move(self, reqs: Iterable[Req], step: Step, *origin: Step) -> None:
        """Let those of `reqs` that are in one of the steps `origin` enter `step`."""
        for req in reqs:
            known = self.live.get(req.rid)
            if known is not None and known.step in origin:
                self.enter(req, step)

    def sweep(self) -> None:
        """Note what the latest result has changed, and let go of the requests that have an end,
        however they came to it."""
        self.move(self.resulted, Step.DECODE, Step.FIRST_DECODE)
        self.resulted = []
        ended = [each.req for each in self.live.values() if each.req.finished()]
        for req in ended:
            self.enter(req, Step.FINISH)

    def owned(self, req: Req) -> dict[str, Any]:
        """Who owns what: the metadata row, the request row and the pages of KV of `req`."""
        facts: dict[str, Any] = {}
        slot = getattr(req, "metadata_slot", None)
        if slot is not None:
            facts |= {"slot": slot.index, "generation": slot.generation, "is": slot.status.value}
        elif getattr(req, "metadata_buffer_index", -1) not in (-1, None):
            facts["slot"] = req.metadata_buffer_index
        row = _of_kv(req, "req_pool_idx")
        if row is not None:
            tokens = int(_of_kv(req, "kv_allocated_len") or 0)
            facts |= {"request_row": int(row), "pages": -(-tokens // self.page_size)}
            table = self.request_rows.req_to_token
            if table.device.type == "cpu":  # reading it elsewhere would wait for the device
                first = table[int(row), : tokens : self.page_size]
                facts["page_numbers"] = runs((first // self.page_size).tolist())
        return facts

    def write_when_due(self) -> None:
        """Write when there is something new and the server is at rest or long unwritten.

        A file that cannot be written is logged; requests go on.
        """
        self.sweep()
        now = time.monotonic_ns()
        resting = not self.live or now - self.written_ns > WRITE_INTERVAL_NS
        if self.entered == self.written or not resting:
            return
        try:
            self.write()
        except OSError as error:
            logger.warning("handoff trace: cannot write %s: %s", self.file, error.strerror)
            return
        self.written, self.written_ns = self.entered, now

    def write(self) -> None:
        """Write the file, whole or not at all; OSError when that fails."""
        scratch = self.file.with_suffix(".partial")
        about = {
            "transitions": self.entered,
            "dropped": max(0, self.entered - self.capacity),
            "live": len(self.live),
        }
        content = {
            "displayTimeUnit": "ms",
            "otherData": about,
            "traceEvents": list(self.events()),
        }
        scratch.write_text(json.dumps(content, separators=(",", ":")))
        scratch.replace(self.file)

    def events(self) -> Iterator[dict[str, Any]]:
        """The ring as trace events. The time is in microseconds and never goes back; each request
        has a lane (`tid`) while it lives, and in it every begin has its end."""
        pid = os.getpid()
        lanes: dict[str, int] = {}
        named = 0
        yield _name("process_name", pid, 0, f"{self.role} {pid}")
        ts = 0.0
        for each in self.ring:
            ts = (self.epoch_ns + each.ns) / 1000
            place = {"pid": pid, "tid": lanes.get(each.rid, 0), "ts": ts, "cat": "handoff"}
            if each.rid in lanes:
                yield {**place, "ph": "E"}
            elif each.step is Step.FINISH:
                continue  # all of it but the end has left the ring
            else:
                lane = place["tid"] = lanes[each.rid] = _first_free(lanes.values())
                if lane > named:
                    named = lane
                    yield _name("thread_name", pid, named, f"lane {named}")
                who = {"rid": each.rid, "room": each.room}
                yield {**place, "ph": "B", "name": each.rid, "args": who}
            if each.step is Step.FINISH:
                yield {**place, "ph": "E", "args": each.facts}
                del lanes[each.rid]
                continue
            yield {**place, "ph": "B", "name": each.step.value, "args": each.facts}
            if each.step in _FLOWS.get(self.role, ()) and each.room:
                yield {**place, **_FLOWS[self.role][each.step], "name": FLOW, "id": each.room}
        for lane in lanes.values():  # still on their way
            for _ in range(2):
                yield {"pid": pid, "tid": lane, "ts": ts, "cat": "handoff", "ph": "E"}


# An arrow from the last chunk's departure to the commit.
_FLOWS: dict[str, dict[Step, dict[str, str]]] = {
    "prefill": {Step.TRANSFER: {"ph": "s"}},
    "decode": {Step.COMMIT: {"ph": "f", "bp": "e"}},
}
_trace: Trace | None = None


def starts(init_disaggregation: Method) -> Method:
    """Decorates Scheduler.init_disaggregation, in which a scheduler takes its role."""

    @functools.wraps(init_disaggregation)
    def traced(scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
        outcome = init_disaggregation(scheduler, *args, **kwargs)
        start(scheduler)
        return outcome

    return traced  # type: ignore[return-value]


def start(scheduler: Scheduler) -> None:
    """Begin to trace if the environment says so.

    Raises:
        ValueError: the directory cannot be written, or the number of transitions is not one.
    """
    global _trace
    directory = os.environ.get(DIRECTORY)
    role = scheduler.disaggregation_mode.value if directory else "null"
    if not directory or role == "null":  # the mode of a server that does both phases
        _trace = None
        return
    given = os.environ.get(CAPACITY, str(DEFAULT_CAPACITY))
    if not given.isdecimal() or int(given) == 0:
        raise ValueError(f"{CAPACITY}={given!r} is not a number of transitions above 0")
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{DIRECTORY}={directory!r}: {error.strerror}") from error
    if not os.access(directory, os.W_OK):
        raise ValueError(f"{DIRECTORY}={directory!r} cannot be written")
    _trace = Trace(
        role,
        Path(directory),
        int(given),
        scheduler.req_to_token_pool,
        scheduler.page_size,
    )


def queued_at_decode(add: Method) -> Method:
    """Decorates DecodePreallocQueue.add: a request arrives, or is retracted."""

    @functools.wraps(add)
    def traced(queue: Any, req: Req, *args: Any, **kwargs: Any) -> Any:
        outcome = add(queue, req, *args, **kwargs)
        if _trace is not None:
            retracted = any(req is each for each in queue.retracted_queue)
            _trace.enter(req, Step.RETRACT if retracted else Step.BOOTSTRAP)
        return outcome

    return traced  # type: ignore[return-value]


def queued_at_prefill(add: Method) -> Method:
    """Decorates PrefillBootstrapQueue.add: a request arrives, or comes back."""

    @functools.wraps(add)
    def traced(queue: Any, req: Req, *args: Any, **kwargs: Any) -> Any:
        outcome = add(queue, req, *args, **kwargs)
        if _trace is not None:
            _trace.enter(req, Step.BOOTSTRAP)
        return outcome

    return traced  # type: ignore[return-value]


def committed(commit: Method) -> Method:
    """Decorates DecodeTransferQueue._commit_transfer_to_req."""

    @functools.wraps(commit)
    def traced(queue: Any, decode_req: Any, *args: Any, **kwargs: Any) -> Any:
        if _trace is not None:
            _trace.enter(decode_req.req, Step.COMMIT)
        return commit(queue, decode_req, *args, **kwargs)

    return traced  # type: ignore[return-value]


def resumed(resume_retracted_reqs: Method) -> Method:
    """Decorates DecodePreallocQueue.resume_retracted_reqs."""

    @functools.wraps(resume_retracted_reqs)
    def traced(*args: Any, **kwargs: Any) -> Any:
        outcome = resume_retracted_reqs(*args, **kwargs)
        if _trace is not None:
            for req in outcome:
                _trace.enter(req, Step.RESUME)
        return outcome

    return traced  # type: ignore[return-value]


def prebuilt(get_new_prebuilt_batch: Method) -> Method:
    """Decorates SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch."""

    @functools.wraps(get_new_prebuilt_batch)
    def traced(*args: Any, **kwargs: Any) -> Any:
        batch = get_new_prebuilt_batch(*args, **kwargs)
        if _trace is not None and batch is not None:
            for req in batch.reqs:
                _trace.enter(req, Step.PREBUILT)
        return batch

    return traced  # type: ignore[return-value]


def forward(batch: ScheduleBatch) -> None:
    """A batch is about to run; called at the top of Scheduler.run_batch."""
    if _trace is not None and not batch.forward_mode.is_prebuilt():
        _trace.move(batch.reqs, Step.PREFILL, Step.BOOTSTRAP, Step.QUEUE)
        _trace.move(batch.reqs, Step.FIRST_DECODE, Step.PREBUILT)


def chunk(req: Req, last_chunk: bool) -> None:
    """A chunk is about to leave prefill, which waits for the transfer alone after the last one;
    called at the top of SchedulerDisaggregationPrefillMixin.send_kv_chunk."""
    if _trace is not None and last_chunk:
        _trace.enter(req, Step.TRANSFER)


def result(batch: ScheduleBatch) -> None:
    """The result of a batch is about to be processed: what it frees is seen at the next sweep.

    Called at the top of Scheduler.process_batch_result.
    """
    if _trace is not None:
        _trace.sweep()
        if not batch.forward_mode.is_prebuilt():
            _trace.resulted = list(batch.reqs)


def passed_at_decode(process_decode_queue: Method) -> Method:
    """Decorates SchedulerDisaggregationDecodeMixin.process_decode_queue: after a pass, who is in
    which queue says what happened to them."""

    @functools.wraps(process_decode_queue)
    def traced(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = process_decode_queue(scheduler, *args, **kwargs)
        if _trace is not None:
            arriving = scheduler.disagg_decode_prealloc_queue.queue
            ready = (each.req for each in arriving if each.waiting_for_input)
            admitted = (each.req for each in scheduler.disagg_decode_transfer_queue.queue)
            _trace.move(ready, Step.PREALLOC, Step.BOOTSTRAP)
            _trace.move(admitted, Step.TRANSFER, Step.BOOTSTRAP, Step.PREALLOC)
            _trace.move(scheduler.waiting_queue, Step.WAIT, Step.COMMIT)
            _trace.sweep()
        return outcome

    return traced  # type: ignore[return-value]


def passed_at_prefill(process_inflight_queue: Method) -> Method:
    """Decorates SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue, which
    returns the requests that it has done with; others have come to wait for a batch."""

    @functools.wraps(process_inflight_queue)
    def traced(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = process_inflight_queue(scheduler, *args, **kwargs)
        if _trace is not None:
            for req in outcome:
                _trace.enter(req, Step.FINISH)
            _trace.move(scheduler.waiting_queue, Step.QUEUE, Step.BOOTSTRAP)
        return outcome

    return traced  # type: ignore[return-value]


def aborted(abort_request: Method) -> Method:
    """Decorates Scheduler.abort_request, which drops waiting requests without marking them."""

    @functools.wraps(abort_request)
    def traced(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        before = list(scheduler.waiting_queue) if _trace is not None else []
        outcome = abort_request(scheduler, *args, **kwargs)
        if _trace is not None:
            kept = {id(req) for req in scheduler.waiting_queue}
            gone = [req for req in before if id(req) not in kept]
            _trace.move(gone, Step.FINISH, *(step for step in Step if step is not Step.FINISH))
            _trace.sweep()
        return outcome

    return traced  # type: ignore[return-value]


def write() -> None:
    """Write what is new; called at the top of Scheduler.get_internal_state."""
    if _trace is not None:
        _trace.write_when_due()


def _of_kv(req: Req, name: str) -> Any:
    """What a request has of its KV: its own until it moved to `req.kv` (0.5.16 to 0.5.19)."""
    kv = getattr(req, "kv", None)
    return getattr(kv if hasattr(kv, name) else req, name, None)


def runs(numbers: list[int]) -> str:
    """Page numbers in their order, consecutive ones as "first-last", the first few runs of them."""
    ends: list[list[int]] = []
    for number in numbers:
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        elif len(ends) == PAGE_RUNS:
            return _told(ends) + ", ..."
        else:
            ends.append([number, number])
    return _told(ends)


def _told(ends: list[list[int]]) -> str:
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)


def _end(req: Req) -> dict[str, Any]:
    """How a request ended."""
    reason = req.finished_reason
    why = "aborted" if reason is None else type(reason).__name__
    return {"reason": why, "tokens": len(req.output_ids)}


def _first_free(taken: Iterable[int]) -> int:
    """The smallest lane from 1 that nobody is in."""
    used = set(taken)
    return next(lane for lane in range(1, len(used) + 2) if lane not in used)


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
