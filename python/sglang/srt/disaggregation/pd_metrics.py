# SPDX-License-Identifier: Apache-2.0
"""How the way of the draft state from prefill to decode goes, in SGLang's own /metrics.

Tallies are kept where things happen and read when SGLang logs its stats, in the same call. Without
`--enable-metrics` nothing of this exists but one look for it per batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from sglang.srt.disaggregation.metadata_slots import SlotPool
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

Method = TypeVar("Method", bound=Callable[..., Any])

ACCEPT_LENGTH_BUCKETS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16)
"""Tokens per verification; a draft that is no use gives 1."""


class Source(Enum):
    """What the first draft after a prebuilt batch starts from."""

    ROW = "row"
    RESTORED = "restored"
    NEUTRAL = "neutral"


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a request was when its prebuilt batch was built."""

    req: Req
    tokens: int
    verifications: int

    def new_tokens(self) -> int:
        return len(self.req.output_ids) - self.tokens

    def accept_length(self) -> float | None:
        """Tokens per verification since; None before the first."""
        verifications = self.req.spec_verify_ct - self.verifications
        return self.new_tokens() / verifications if verifications else None


class PDMetrics:
    """The series' metrics of one scheduler; `publish` brings them up to date."""

    def __init__(self, scheduler: Scheduler, collector: Any) -> None:
        self.scheduler = scheduler
        self.sources: dict[Source, int] = dict.fromkeys(Source, 0)
        self._labels: Mapping[str, Any] = collector.labels
        self._published: dict[tuple[Any, ...], int] = {}
        self._awaited: dict[int, Mark] = {}
        self._resumed: dict[int, Mark] = {}
        self._first_lengths: list[float] = []
        self._resumed_lengths: list[float] = []

        gauge = functools.partial(_class_of(collector, "Gauge"), multiprocess_mode="mostrecent")
        counter, histogram = _class_of(collector, "Counter"), _class_of(collector, "Histogram")
        names = list(self._labels)
        self.slots = gauge(
            name="sglang:pd_metadata_slots",
            documentation="Metadata rows of a decode server, by status.",
            labelnames=[*names, "status"],
        )
        self.longest_hold = gauge(
            name="sglang:pd_metadata_slot_longest_hold_seconds",
            documentation="Longest time a metadata row was held since the last report.",
            labelnames=names,
        )
        self.digests = counter(
            name="sglang:pd_handoff_digests_total",
            documentation="Metadata rows signed or compared with their digest, by stage.",
            labelnames=[*names, "stage", "verdict"],
        )
        self.draft_state = counter(
            name="sglang:pd_draft_state_total",
            documentation="Requests by what their first draft on this server started from.",
            labelnames=[*names, "source"],
        )
        self.hits_refused = counter(
            name="sglang:pd_draft_hits_refused_total",
            documentation="Prefix cache hits not taken, or cut, for want of the draft's KV rows.",
            labelnames=[*names, "reason"],
        )
        self.probes = counter(
            name="sglang:pd_health_probes_total",
            documentation="Health probes by what became of them.",
            labelnames=[*names, "outcome"],
        )
        self.first_length = histogram(
            name="sglang:pd_first_step_accept_length",
            documentation="Accept length of the first decode step after a transfer.",
            labelnames=names,
            buckets=ACCEPT_LENGTH_BUCKETS,
        )
        self.resumed_length = histogram(
            name="sglang:pd_resumed_accept_length",
            documentation="Mean accept length of a request from its resume to its end.",
            labelnames=names,
            buckets=ACCEPT_LENGTH_BUCKETS,
        )

    def see_prebuilt(self, batch: ScheduleBatch) -> None:
        """Note where the requests of a prebuilt batch stand, and what they will draft from."""
        if not batch.spec_algorithm.is_eagle():
            return
        for req in batch.reqs:
            source = _source(req)
            self.sources[source] += 1
            mark = Mark(req, len(req.output_ids), req.spec_verify_ct)
            self._awaited.pop(id(req), None)
            self._close(id(req))
            begun = self._awaited if source is Source.ROW else self._resumed
            begun[id(req)] = mark

    def see_result(self, batch: ScheduleBatch) -> None:
        """Note the first result of each awaited request in the batch just processed.

        A first step that ends its request is cut short and says nothing about its draft.
        """
        for req in batch.reqs if self._awaited else ():
            mark = self._awaited.get(id(req))
            if mark is None or not mark.new_tokens():
                continue
            del self._awaited[id(req)]
            if not req.finished():
                self._first_lengths.append(mark.new_tokens())

    def publish(self) -> None:
        """Bring all metrics up to date, with what was tallied since the last time."""
        from sglang.srt.disaggregation import handoff_digest
        from sglang.srt.managers import health_probe
        from sglang.srt.mem_cache import draft_reuse

        pool: SlotPool | None = getattr(self.scheduler.req_to_token_pool, "metadata_slots", None)
        if pool is not None:
            for status, rows in pool.counts().items():
                self.slots.labels(**self._labels, status=status).set(rows)
            self.longest_hold.labels(**self._labels).set(pool.take_longest_hold())
        digests = handoff_digest.of(getattr(self.scheduler, "disagg_metadata_buffers", None))
        for (stage, verdict), n in digests.tally.items() if digests else ():
            self._count(self.digests, n, stage=stage.value, verdict=verdict.value)
        for source, n in self.sources.items():
            self._count(self.draft_state, n, source=source.value)
        for reason in draft_reuse.Reason:
            self._count(self.hits_refused, draft_reuse.refused[reason], reason=reason.name.lower())
        for outcome in health_probe.Outcome:
            self._count(self.probes, health_probe.outcomes[outcome], outcome=outcome.value)
        self._close(*(key for key, mark in self._resumed.items() if mark.req.finished()))
        self._awaited = {k: mark for k, mark in self._awaited.items() if not mark.req.finished()}
        self._observe(self.first_length, self._first_lengths)
        self._observe(self.resumed_length, self._resumed_lengths)

    def _close(self, *keys: int) -> None:
        """Take the accept length of resumed requests that end here, or are resumed once more."""
        for key in keys:
            mark = self._resumed.pop(key, None)
            length = None if mark is None else mark.accept_length()
            if length is not None:
                self._resumed_lengths.append(length)

    def _count(self, counter: Any, total: int, **more: str) -> None:
        """Raise a counter to `total`; it shows 0 from the first report on."""
        key = (counter, *more.values())
        counter.labels(**self._labels, **more).inc(total - self._published.get(key, 0))
        self._published[key] = total

    def _observe(self, histogram: Any, values: list[float]) -> None:
        child = histogram.labels(**self._labels)
        for value in values:
            child.observe(value)
        values.clear()


def attach(scheduler: Scheduler) -> None:
    """Give the scheduler's metrics collector, if it has one, the series' metrics.

    A server that switches its role keeps those it has: a name can be registered once.
    """
    collector = getattr(scheduler, "metrics_collector", None)
    if collector is None:
        return
    if not hasattr(collector, "pd_metrics"):
        collector.pd_metrics = PDMetrics(scheduler, collector)
    scheduler.req_to_token_pool.pd_metrics = collector.pd_metrics


def published(log_stats: Method) -> Method:
    """Decorates SchedulerMetricsCollector.log_stats: the series' metrics go along."""

    @functools.wraps(log_stats)
    def log(collector: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = log_stats(collector, *args, **kwargs)
        metrics: PDMetrics | None = getattr(collector, "pd_metrics", None)
        if metrics is not None:
            metrics.publish()
        return outcome

    return log  # type: ignore[return-value]


def see_prebuilt(batch: ScheduleBatch) -> None:
    """Note a prebuilt batch that is about to be built, where there are metrics."""
    metrics: PDMetrics | None = getattr(batch.req_to_token_pool, "pd_metrics", None)
    if metrics is not None:
        metrics.see_prebuilt(batch)


def sees_result(process: Method) -> Method:
    """Decorates Scheduler.process_batch_result: first results are noted, where there are metrics.

    The metrics are those beside the scheduler's request pool; other schedulers have none.
    """

    @functools.wraps(process)
    def processed(scheduler: Scheduler, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        outcome = process(scheduler, batch, *args, **kwargs)
        pool = getattr(scheduler, "req_to_token_pool", None)
        metrics: PDMetrics | None = getattr(pool, "pd_metrics", None)
        if metrics is not None:
            metrics.see_result(batch)
        return outcome

    return processed  # type: ignore[return-value]


def _class_of(collector: Any, kind: str) -> Any:
    """The class SGLang makes this kind of metric of: another backend's, or prometheus_client's.

    prometheus_client is imported here, after SGLang has said where processes share their values.
    """
    import prometheus_client

    other = getattr(collector, f"_{kind.lower()}_cls", None)  # from 0.5.13 on
    return other or getattr(prometheus_client, kind)


def _source(req: Req) -> Source:
    if getattr(req, "metadata_slot", None) is not None:
        return Source.ROW
    return Source.NEUTRAL if req.output_topk_p is None else Source.RESTORED
