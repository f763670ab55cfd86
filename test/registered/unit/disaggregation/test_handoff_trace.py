# SPDX-License-Identifier: Apache-2.0
"""Every step of a request's way is in the trace with what it owned, and the trace opens."""

import inspect
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.disaggregation import decode, handoff_trace, prefill
from sglang.srt.disaggregation.handoff_trace import Step
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.scheduler import Scheduler
from sglang.test.ci.ci_register import register_cpu_ci

sys.path.insert(0, str(Path(__file__).parent))
try:
    from decode_side import DecodeSide, Receiver
except ImportError:  # comes with metadata-slots
    DecodeSide = None
else:

    class DecodeSide(DecodeSide):
        """Without a model there is no `run_batch`; what stands at its top is called instead."""

        def result(self, batch):
            handoff_trace.forward(batch)
            super().result(batch)


register_cpu_ci(est_time=20, suite="base-a-test-cpu")

WAY = [
    Step.BOOTSTRAP,
    Step.PREALLOC,
    Step.TRANSFER,
    Step.COMMIT,
    Step.WAIT,
    Step.PREBUILT,
    Step.FIRST_DECODE,
    Step.DECODE,
    Step.FINISH,
]


def request(rid="a", room=7, finished_reason=None):
    """A request as the trace looks at it."""
    req = SimpleNamespace(rid=rid, bootstrap_room=room, output_ids=[], req_pool_idx=None)
    req.finished_reason = finished_reason
    req.finished = lambda: req.finished_reason is not None
    return req


def wrappers(function):
    """The modules, by their last name, of a function and of all that is wrapped around it."""
    files = []
    while function is not None:
        files.append(Path(function.__code__.co_filename).stem)
        function = getattr(function, "__wrapped__", None)
    return files


def check_well_formed(test, events, most):
    """Ends match begins in every lane, times never go back, and there are no more than `most`."""
    test.assertLessEqual(len(events), most)
    open_in, last = {}, 0.0
    for event in events:
        test.assertIsInstance(event["pid"], int)
        test.assertIsInstance(event["tid"], int)
        if event["ph"] == "M":
            continue
        test.assertGreaterEqual(event["ts"], last)
        last = event["ts"]
        lane = open_in.setdefault((event["pid"], event["tid"]), [])
        if event["ph"] == "B":
            test.assertTrue(event["name"])
            lane.append(event["name"])
            test.assertLessEqual(len(lane), 2)
        elif event["ph"] == "E":
            test.assertTrue(lane, "an end without a begin")
            lane.pop()
        else:
            test.assertIn(event["ph"], "sf")
            test.assertTrue(lane, "an arrow that is tied to nothing")
    test.assertEqual([lane for lane in open_in.values() if lane], [])


class TraceTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.directory = Path(scratch.name, "trace")
        self.addCleanup(setattr, handoff_trace, "_trace", None)

    def start(self, mode=DisaggregationMode.DECODE, rows=None, **environment):
        """A scheduler of that role begins to trace; `rows` is its request pool."""
        given = {handoff_trace.DIRECTORY: str(self.directory), **environment}
        rows = rows or SimpleNamespace(req_to_token=torch.zeros((2, 8), dtype=torch.int32))
        scheduler = SimpleNamespace(disaggregation_mode=mode, req_to_token_pool=rows, page_size=1)
        with mock.patch.dict(os.environ, given):
            handoff_trace.start(scheduler)
        self.trace = handoff_trace._trace
        return self.trace

    def steps(self, rid):
        return [each.step for each in self.trace.ring if each.rid == rid]

    def facts(self, rid, step):
        return next(e.facts for e in self.trace.ring if (e.rid, e.step) == (rid, step))


@unittest.skipUnless(DecodeSide, "needs the decode side of metadata-slots")
class TestDecode(TraceTest):
    def serve(self, **how):
        side = DecodeSide(**how)
        self.addCleanup(side.close)
        self.start(rows=side.rows)
        return side

    def arrive(self, side, rid, room, **how):
        """A request comes in by the queue's own door; its peer is ready to shake hands."""
        req = side.arrive(rid, room, **how)
        side.prealloc.queue.pop()
        with (
            mock.patch.object(decode, "get_kv_class", lambda *_: lambda mgr, **_: Receiver(mgr)),
            mock.patch.object(
                side.prealloc, "_resolve_prefill_dp_rank", lambda _: None, create=True
            ),
        ):
            side.prealloc.add(req)
        if hasattr(side.prealloc, "pending_reqs"):
            side.prealloc.pending_reqs.clear()  # which prefill rank it is, is known
        return req

    def committed(self, side, rid, room, **how):
        req = self.arrive(side, rid, room, **how)
        with mock.patch.object(type(side.rows), "available_size", lambda _: 0):
            side.poll()  # shakes hands, but gets no request row yet
        side.poll()
        side.arrived(rid)
        side.poll()
        return req

    def test_every_step_is_there_once_and_in_order(self):
        side = self.serve()
        req = self.committed(side, "a", 1)
        side.turns()
        self.assertTrue(req.finished())
        self.assertEqual(self.steps("a"), WAY)
        self.assertEqual(self.trace.live, {})

    def test_a_retracted_request_resumes_and_drafts_first_again(self):
        side = self.serve()
        req = self.committed(side, "a", 1, max_new_tokens=20)
        side.turns(3)  # 0.5.9 spends one on the prebuilt batch
        side.retract(req)
        side.prealloc.retracted_queue.remove(req)
        side.prealloc.add(req, is_retracted=True)
        side.turns(30)
        self.assertTrue(req.finished())
        again = [Step.RETRACT, Step.RESUME, Step.PREBUILT, Step.FIRST_DECODE, Step.DECODE]
        self.assertEqual(self.steps("a"), [*WAY[:-1], *again, Step.FINISH])

    def test_the_row_is_owned_from_the_transfer_to_the_first_result(self):
        side = self.serve()
        req = self.arrive(side, "a", 1)
        side.poll()
        slot = req.metadata_slot
        side.arrived("a")
        side.turns()
        owned = {"slot": slot.index, "generation": slot.generation}
        for step, state in (
            (Step.TRANSFER, "transferring"),
            (Step.COMMIT, "transferring"),
            (Step.WAIT, "waiting"),
            (Step.FIRST_DECODE, "prebuilt"),
        ):
            self.assertLessEqual((owned | {"is": state}).items(), self.facts("a", step).items())
        for step in (Step.BOOTSTRAP, Step.DECODE, Step.FINISH):
            self.assertNotIn("slot", self.facts("a", step))

    def test_pages_and_their_numbers_are_those_of_the_request(self):
        side = self.serve()
        req = self.committed(side, "a", 1)
        facts = self.facts("a", Step.TRANSFER)
        row, length = (
            getattr(req, name) if hasattr(req, name) else getattr(req.kv, name)
            for name in ("req_pool_idx", "kv_allocated_len")
        )
        numbers = side.rows.req_to_token[row, :length].tolist()
        self.assertEqual(facts["request_row"], row)
        self.assertEqual(facts["pages"], length)
        self.assertEqual(facts["page_numbers"], handoff_trace.runs(numbers))
        self.assertNotIn("pages", self.facts("a", Step.BOOTSTRAP))

    def test_a_failed_transfer_ends_the_request(self):
        side = self.serve()
        self.arrive(side, "a", 1)
        side.poll()
        side.fail("a")
        side.poll()
        self.assertEqual(self.steps("a")[-1], Step.FINISH)
        self.assertEqual(self.facts("a", Step.FINISH)["reason"], "FINISH_ABORT")

    def test_an_abort_ends_the_request_wherever_it_is(self):
        side = self.serve()
        self.committed(side, "waiting", 1)
        self.arrive(side, "in transfer", 2)
        side.poll()
        self.arrive(side, "queued", 3)
        for rid in ("waiting", "in transfer", "queued"):
            side.abort(rid)
        side.turns()
        for rid in ("waiting", "in transfer", "queued"):
            self.assertEqual(self.steps(rid)[-1], Step.FINISH, rid)
        self.assertEqual(self.trace.live, {})

    def test_requests_that_overlap_have_lanes_of_their_own(self):
        side = self.serve()
        for number, rid in enumerate("abc", 1):
            self.arrive(side, rid, number)
        side.poll()
        for rid in "abc":
            side.arrived(rid)
        side.turns()
        self.committed(side, "d", 4)
        side.turns()
        events = list(self.trace.events())
        check_well_formed(self, events, 200)
        begun = {e["name"]: e["tid"] for e in events if e["ph"] == "B" and "rid" in e["args"]}
        self.assertEqual(begun, {"a": 1, "b": 2, "c": 3, "d": 1})

    def test_nothing_is_noted_when_off(self):
        side = self.serve()
        trace, handoff_trace._trace = self.trace, None
        req = side.arrive("a", 1)
        side.poll()
        side.arrived("a")
        side.turns()
        self.assertTrue(req.finished())
        self.assertEqual(trace.entered, 0)


class TestPrefill(TraceTest):
    def test_the_steps_of_a_request(self):
        self.start(DisaggregationMode.PREFILL)
        req = request()
        mode = SimpleNamespace(is_prebuilt=lambda: False)
        handoff_trace.queued_at_prefill(lambda *_: None)(None, req)
        passed = handoff_trace.passed_at_prefill(lambda scheduler: scheduler.done)
        passed(SimpleNamespace(waiting_queue=[req], done=[]))
        handoff_trace.forward(SimpleNamespace(reqs=[req], forward_mode=mode))
        handoff_trace.chunk(req, last_chunk=False)
        handoff_trace.chunk(req, last_chunk=True)
        passed(SimpleNamespace(waiting_queue=[], done=[req]))
        self.assertEqual(
            self.steps("a"),
            [Step.BOOTSTRAP, Step.QUEUE, Step.PREFILL, Step.TRANSFER, Step.FINISH],
        )

    def test_sglang_s_own_steps_are_the_ones_that_note_them(self):
        queue, steps = prefill.PrefillBootstrapQueue, prefill.SchedulerDisaggregationPrefillMixin
        for step in (
            queue.add,
            steps.process_disagg_prefill_inflight_queue,
            Scheduler.init_disaggregation,
        ):
            self.assertIn("handoff_trace", wrappers(step), step.__name__)
        for step in (steps.send_kv_chunk, Scheduler.run_batch, Scheduler.get_internal_state):
            names = inspect.unwrap(step).__code__.co_names
            self.assertIn("handoff_trace", names, step.__name__)

    def test_the_arrow_leaves_with_the_last_chunk(self):
        trace = self.start(DisaggregationMode.PREFILL)
        for step in (Step.BOOTSTRAP, Step.TRANSFER, Step.FINISH):
            trace.enter(request(room=42), step)
        arrows = [event for event in trace.events() if event["ph"] in "sf"]
        self.assertEqual([(e["ph"], e["id"], e["name"]) for e in arrows], [("s", 42, "handoff")])


class TestTheRing(TraceTest):
    def test_it_is_bounded_and_what_is_left_is_well_formed(self):
        trace = self.start(**{handoff_trace.CAPACITY: "50"})
        for number in range(100):
            for step in WAY:
                trace.enter(request(str(number)), step)
        self.assertEqual((len(trace.ring), trace.entered), (50, 900))
        events = list(trace.events())
        check_well_formed(self, events, 3 + 50 * 4)
        self.assertIn("99", [event.get("name") for event in events])

    def test_a_request_without_an_end_is_closed(self):
        trace = self.start()
        trace.enter(request(), Step.BOOTSTRAP)
        trace.enter(request(), Step.PREALLOC)
        check_well_formed(self, list(trace.events()), 20)

    def test_requests_that_vanish_are_not_kept_for_ever(self):
        trace = self.start(**{handoff_trace.CAPACITY: "10"})
        for number in range(50):
            trace.enter(request(str(number)), Step.BOOTSTRAP)
        self.assertEqual(len(trace.live), 10)

    def test_a_step_that_goes_on_is_noted_once(self):
        trace = self.start()
        for _ in range(3):
            trace.enter(request(), Step.PREALLOC)
        trace.enter(request("never seen"), Step.FINISH)
        self.assertEqual(trace.entered, 1)


class TestTheFile(TraceTest):
    def test_it_is_written_when_it_is_asked_for(self):
        trace = self.start()
        req = request()
        trace.enter(req, Step.BOOTSTRAP)
        req.finished_reason = object()
        handoff_trace.write()
        content = json.loads(trace.file.read_text())
        self.assertEqual(content["otherData"], {"transitions": 2, "dropped": 0, "live": 0})
        check_well_formed(self, content["traceEvents"], 20)
        self.assertEqual([path.name for path in self.directory.iterdir()], [trace.file.name])

    def test_it_is_written_once_and_under_load_no_more_often_than_it_may(self):
        trace = self.start()
        with mock.patch.object(trace, "write") as write:
            trace.enter(request(), Step.BOOTSTRAP)
            handoff_trace.write()  # the first is always due
            trace.enter(request(), Step.PREALLOC)
            handoff_trace.write()
            self.assertEqual(write.call_count, 1)
            trace.written_ns -= handoff_trace.WRITE_INTERVAL_NS + 1
            handoff_trace.write()
            handoff_trace.write()
            self.assertEqual(write.call_count, 2)

    def test_a_file_that_cannot_be_written_stops_nobody(self):
        trace = self.start()
        trace.enter(request(), Step.BOOTSTRAP)
        with (
            mock.patch.object(trace, "write", side_effect=OSError(28, "No space left")),
            self.assertLogs(handoff_trace.logger, "WARNING"),
        ):
            handoff_trace.write()
        self.assertEqual(trace.written, 0)

    def test_bad_settings_are_named(self):
        self.directory.parent.joinpath("file").touch()
        for given, said in (
            ({handoff_trace.CAPACITY: "many"}, "'many' is not a number"),
            ({handoff_trace.CAPACITY: "0"}, "'0' is not a number"),
            ({handoff_trace.DIRECTORY: str(self.directory.parent / "file" / "x")}, "Not a dir"),
        ):
            with self.assertRaisesRegex(ValueError, said):
                self.start(**given)

    def test_a_server_that_does_both_phases_does_not_trace(self):
        self.assertIsNone(self.start(DisaggregationMode.NULL))
        self.assertFalse(self.directory.exists())

    def test_without_the_environment_it_stays_off(self):
        with mock.patch.dict(os.environ):
            os.environ.pop(handoff_trace.DIRECTORY, None)
            handoff_trace.start(None)
        self.assertIsNone(handoff_trace._trace)


class TestRuns(unittest.TestCase):
    def test_consecutive_numbers_are_told_as_one(self):
        self.assertEqual(handoff_trace.runs([]), "")
        self.assertEqual(handoff_trace.runs([4]), "4")
        self.assertEqual(handoff_trace.runs([4, 5, 6, 9, 2, 3]), "4-6, 9, 2-3")
        many = handoff_trace.runs(list(range(0, 100, 2)))
        self.assertTrue(many.startswith("0, 2, 4"))
        self.assertTrue(many.endswith("14, ..."))


if __name__ == "__main__":
    unittest.main()
