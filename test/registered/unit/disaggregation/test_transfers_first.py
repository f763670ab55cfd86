# SPDX-License-Identifier: Apache-2.0
"""A finished transfer is taken in whatever waits for memory, and a failed one is noticed."""

import sys
import unittest
from pathlib import Path

from sglang.test.ci.ci_register import register_cpu_ci

sys.path.insert(0, str(Path(__file__).parent))
try:
    from decode_side import DecodeSide
except ImportError:  # comes with metadata-slots
    DecodeSide = None

register_cpu_ci(est_time=15, suite="base-a-test-cpu")


@unittest.skipUnless(DecodeSide, "needs the decode side of metadata-slots")
class TestWhileRetractedRequestsWait(unittest.TestCase):
    def setUp(self):
        """One request is retracted and finds no memory, another is in transfer."""
        self.side = side = DecodeSide()
        self.addCleanup(side.close)
        self.retracted = side.arrive("retracted", 1, max_new_tokens=20)
        side.poll()
        side.arrived("retracted")
        side.turns(4)
        self.req = side.arrive("in transfer", 2)
        side.poll()
        side.retract(self.retracted)
        self.resume = side.prealloc.resume_retracted_reqs
        side.prealloc.resume_retracted_reqs = lambda *_: []

    def free_memory(self):
        self.side.prealloc.resume_retracted_reqs = self.resume

    def test_a_finished_transfer_is_taken_in(self):
        self.side.arrived("in transfer")
        self.side.poll()
        self.assertEqual(self.side.waiting(), ["in transfer"])
        self.assertEqual(self.side.prealloc.retracted_queue, [self.retracted])

    def test_it_runs_to_its_end_and_gives_back_what_it_held(self):
        self.side.arrived("in transfer")
        self.side.turns()
        self.assertTrue(self.req.finished())
        self.free_memory()
        self.side.turns(40)
        self.assertTrue(self.retracted.finished())
        self.side.check_all_free()

    def test_one_that_is_under_way_stays(self):
        self.side.poll()
        self.assertEqual(self.side.waiting(), [])
        self.assertEqual([e.req.rid for e in self.side.transfer.queue], ["in transfer"])

    def test_failures_and_aborts_are_noticed(self):
        for end in (self.side.fail, self.side.abort):
            with self.subTest(end=end.__name__):
                self.setUp()
                end = getattr(self.side, end.__name__)
                end("in transfer")
                self.side.poll()
                self.assertEqual(self.side.transfer.queue, [])
                self.assertIsNotNone(self.req.finished_reason)

    def test_nothing_new_is_admitted_meanwhile(self):
        self.side.arrive("new", 3)
        self.side.poll()
        self.assertEqual([e.req.rid for e in self.side.prealloc.queue], ["new"])


if __name__ == "__main__":
    unittest.main()
