# SPDX-License-Identifier: Apache-2.0
"""/metrics tells how the draft state's way from prefill to the first draft goes."""

import os
import sys
import unittest
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import prometheus_client
import torch
from sglang.srt.disaggregation import handoff_digest, pd_metrics
from sglang.srt.managers import health_probe
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.mem_cache import draft_reuse
from sglang.test.ci.ci_register import register_cpu_ci

try:  # 0.5.10 and later
    from sglang.srt.observability import metrics_collector
except ImportError:
    from sglang.srt.metrics import collector as metrics_collector

sys.path.insert(0, str(Path(__file__).parent))
from decode_side import DecodeSide

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

LABELS = {"model_name": "m", "engine_type": "decode", "tp_rank": 0, "pp_rank": 0}


class Collector(metrics_collector.SchedulerMetricsCollector):
    """SGLang's own, with stand-ins for the metrics that are not the series'."""

    def __init__(self):
        self.labels = LABELS

    def __getattr__(self, name):
        if name == "pd_metrics" or name.startswith("__"):
            raise AttributeError(name)
        return None if name.endswith("_cls") else mock.MagicMock()


class MetricsTest(unittest.TestCase):
    def setUp(self):
        """A decode server with metrics, in a registry of its own."""
        self.registry = prometheus_client.CollectorRegistry()
        for kind in ("Counter", "Gauge", "Histogram"):
            self.patch(prometheus_client, kind, self.registered(getattr(prometheus_client, kind)))
        self.patch(draft_reuse, "refused", Counter())
        self.patch(health_probe, "outcomes", Counter())
        environment = mock.patch.dict(os.environ, {handoff_digest.POLICY: "count"})
        environment.start()
        self.addCleanup(environment.stop)
        self.side = DecodeSide()
        self.addCleanup(self.side.close)
        self.side.scheduler.metrics_collector = Collector()
        pd_metrics.attach(self.side.scheduler)

    def patch(self, target, name, value):
        patch = mock.patch.object(target, name, value)
        patch.start()
        self.addCleanup(patch.stop)

    def registered(self, plain):
        return lambda *args, **kwargs: plain(*args, registry=self.registry, **kwargs)

    def report(self):
        """SGLang logs its stats."""
        stats = metrics_collector.SchedulerStats()
        self.side.scheduler.metrics_collector.log_stats(stats)

    def value(self, name, **labels):
        own = {label: str(value) for label, value in LABELS.items()}
        return self.registry.get_sample_value(f"sglang:pd_{name}", own | labels)

    def handed_over(self, *rids):
        """Requests that wait for their prebuilt batch."""
        reqs = [self.side.arrive(rid, 100 + i, 40) for i, rid in enumerate(rids)]
        self.side.poll()
        for rid in rids:
            self.side.arrived(rid)
        self.side.poll()
        return reqs

    def resume(self, req, state=None):
        """KV pressure takes `req` away and it comes back, with draft state or without."""
        self.side.retract(req)
        if state is not None:
            req.output_topk_p = req.output_topk_index = torch.zeros(16)
            req.hidden_states_tensor = torch.zeros(self.side.hidden)
        self.side.poll()
        self.side.prebuild()
        self.side.first_result()

    def lengths(self, name):
        """How many accept lengths a histogram holds, and their sum."""
        return self.value(f"{name}_count"), self.value(f"{name}_sum")


class TestSlots(MetricsTest):
    def test_rows_are_shown_by_status_and_add_up(self):
        self.handed_over("a", "b")
        self.report()
        rows = {
            status: self.value("metadata_slots", status=status)
            for status in self.side.slots.counts()
        }
        self.assertEqual(rows["waiting"], 2)
        self.assertEqual(sum(rows.values()), self.side.slots.size)

    def test_the_longest_hold_is_that_since_the_last_report(self):
        self.handed_over("a")
        for seconds, expected, over in ((3, 3, False), (4, 7, True), (5, 0, False)):
            self.side.now += seconds
            if over:
                self.side.prebuild()
                self.side.first_result()
            self.report()
            self.assertEqual(self.value("metadata_slot_longest_hold_seconds"), expected)


class TestDraftState(MetricsTest):
    def sources(self):
        self.report()
        return [self.value("draft_state_total", source=s.value) for s in pd_metrics.Source]

    def test_a_first_draft_starts_from_a_row_from_restored_state_or_from_none(self):
        (req,) = self.handed_over("a")
        self.side.prebuild()
        self.side.first_result()
        self.assertEqual(self.sources(), [1, 0, 0])
        self.resume(req, state=True)
        self.assertEqual(self.sources(), [1, 1, 0])
        req.output_topk_p = None
        self.resume(req)
        self.assertEqual(self.sources(), [1, 1, 1])

    def test_a_server_that_does_not_draft_from_rows_counts_none(self):
        side = DecodeSide(spec="NGRAM")
        self.addCleanup(side.close)
        batch = SimpleNamespace(
            spec_algorithm=side.scheduler.spec_algorithm,
            reqs=[object()],
            req_to_token_pool=self.side.rows,
        )
        pd_metrics.see_prebuilt(batch)
        self.assertEqual(self.sources(), [0, 0, 0])


class TestAcceptLength(MetricsTest):
    def test_the_first_step_of_each_request_counts_once(self):
        self.handed_over("a", "b")
        self.side.accepted = 3
        self.side.prebuild()
        self.side.first_result()
        self.side.accepted = 1
        self.side.turns(3)
        self.report()
        self.assertEqual(self.lengths("first_step_accept_length"), (2, 6))

    def test_a_first_step_that_ends_its_request_says_nothing(self):
        self.handed_over("a")
        self.side.accepted = 100
        self.side.prebuild()
        self.side.first_result()
        self.report()
        self.assertEqual(self.lengths("first_step_accept_length"), (0, 0))

    def test_a_resumed_request_counts_with_the_mean_from_its_resume_on(self):
        (req,) = self.handed_over("a")
        self.side.accepted = 1
        self.side.prebuild()
        self.side.first_result()
        self.side.accepted = 4
        self.resume(req, state=True)
        self.side.accepted = 2
        self.side.turn()
        self.report()
        self.assertEqual(self.lengths("resumed_accept_length"), (0, 0))
        self.side.accepted = 3
        while not req.finished():
            self.side.turn()
        self.report()
        steps = req.spec_verify_ct - 1
        expected = (len(req.output_ids) - 2) / steps
        self.assertEqual(self.lengths("resumed_accept_length"), (1, expected))
        self.assertEqual(self.lengths("first_step_accept_length"), (1, 1))

    def test_a_second_resume_ends_the_first(self):
        (req,) = self.handed_over("a")
        self.side.prebuild()
        self.side.first_result()
        self.side.accepted = 4
        self.resume(req, state=True)
        self.side.accepted = 2
        self.resume(req, state=True)
        self.report()
        self.assertEqual(self.lengths("resumed_accept_length"), (1, 4))

    def test_a_request_that_leaves_before_its_first_step_is_forgotten(self):
        (req,) = self.handed_over("a")
        self.side.prebuild()
        req.finished_reason = SimpleNamespace()
        self.report()
        metrics = self.side.scheduler.metrics_collector.pd_metrics
        self.assertEqual((metrics._awaited, metrics._resumed), ({}, {}))


class TestTallies(MetricsTest):
    def test_digests_count_by_stage_and_verdict(self):
        self.handed_over("a")  # from a prefill that does not sign
        self.report()
        count = self.value("handoff_digests_total", stage="commit", verdict="unsigned")
        self.assertEqual(count, 1)

    def test_refused_hits_count_by_reason_and_are_there_before_the_first(self):
        self.report()
        refused = {r.name.lower() for r in draft_reuse.Reason}
        zero = {r: self.value("draft_hits_refused_total", reason=r) for r in refused}
        self.assertEqual(zero, dict.fromkeys(refused, 0))
        for _ in range(2):
            draft_reuse.tell(draft_reuse.Reason.UNSAVED, "hits", "what is done")
        self.report()
        self.assertEqual(self.value("draft_hits_refused_total", reason="unsaved"), 2)

    def test_probes_count_by_what_became_of_them(self):
        health_probe.outcomes[health_probe.Outcome.ANSWERED] += 2
        withdrawn = AbortReq(rid=f"{health_probe.RID_PREFIX}_1")
        health_probe.answer(self.side.scheduler, [withdrawn, AbortReq(rid="a")])
        self.report()
        probes = [self.value("health_probes_total", outcome=o.value) for o in health_probe.Outcome]
        self.assertEqual(probes, [2, 0, 1])

    def test_a_counter_grows_by_what_is_new(self):
        outcome = health_probe.Outcome.ANSWERED
        for _ in range(3):
            health_probe.outcomes[outcome] += 1
            self.report()
        self.assertEqual(self.value("health_probes_total", outcome=outcome.value), 3)


class TestWithoutMetrics(unittest.TestCase):
    def test_a_server_without_them_carries_nothing(self):
        side = DecodeSide()
        self.addCleanup(side.close)
        side.scheduler.metrics_collector = None
        pd_metrics.attach(side.scheduler)
        side.arrive("a", 1)
        side.poll()
        side.arrived("a")
        side.turns(3)
        self.assertFalse(hasattr(side.rows, "pd_metrics"))


class TestRoleSwitch(MetricsTest):
    def test_a_second_start_keeps_the_metrics(self):
        before = self.side.scheduler.metrics_collector.pd_metrics
        pd_metrics.attach(self.side.scheduler)
        self.assertIs(self.side.rows.pd_metrics, before)


if __name__ == "__main__":
    unittest.main()
