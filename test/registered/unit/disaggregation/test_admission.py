# SPDX-License-Identifier: Apache-2.0
"""What fits into the pool when nothing else is there is admitted, resumed and never in the way."""

import itertools
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace

from sglang.srt.disaggregation import admission
from sglang.test.ci.ci_register import register_cpu_ci

sys.path.insert(0, str(Path(__file__).parent))
try:
    from decode_side import PROMPT, DecodeSide
except ImportError:  # comes with metadata-slots, from 0.5.9 on
    DecodeSide = None

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

POOL = 4096
NEW_TOKENS = 4


class TestReserve(unittest.TestCase):
    def reserve(self, prompt, new, held, pool=1200, setting=512, page=1):
        queue = SimpleNamespace(
            max_total_num_tokens=pool,
            num_reserved_decode_tokens=setting,
            token_to_kv_pool_allocator=SimpleNamespace(page_size=page),
        )
        req = SimpleNamespace(
            origin_input_ids=range(prompt), sampling_params=SimpleNamespace(max_new_tokens=new)
        )
        return admission.reserve(queue, req, held)

    def test_the_setting_where_a_request_can_use_it_up(self):
        self.assertEqual(self.reserve(100, 1000, 100), 512)

    def test_what_a_request_can_still_generate_where_that_is_less(self):
        self.assertEqual(self.reserve(1000, 8, 1000), 8)
        self.assertEqual(self.reserve(40, 900, 700), 240)
        self.assertEqual(self.reserve(40, 900, 940), 0)
        self.assertEqual(self.reserve(10, 0, 10), 0)

    def test_what_is_held_and_reserved_never_exceeds_the_pool(self):
        for page, prompt, new, setting in itertools.product(
            (1, 16, 64), (1, 63, 64, 65, 600, 1000, 1150), (0, 1, 8, 190, 5000), (0, 8, 512, 9999)
        ):
            pool = 1216
            held = -(-prompt // page) * page
            kept = self.reserve(prompt, new, held, pool, setting, page)
            self.assertGreaterEqual(kept, 0)
            self.assertLessEqual(kept, setting)
            self.assertLessEqual(held + kept, pool // page * page)


@unittest.skipUnless(DecodeSide, "needs the decode side of metadata-slots")
class TestQueue(unittest.TestCase):
    def serve(self, setting=POOL - 1):
        side = DecodeSide()
        self.addCleanup(side.close)
        side.prealloc.num_reserved_decode_tokens = setting
        return side

    def in_transfer(self, side):
        return [entry.req.rid for entry in side.transfer.queue]

    def test_a_request_that_fits_an_empty_pool_is_admitted(self):
        side = self.serve()
        side.arrive("long", 1)
        side.poll()
        self.assertEqual(self.in_transfer(side), ["long"])

    def test_those_behind_it_are_served_in_order(self):
        side = self.serve(setting=POOL // 2)
        rids = ["first", "second", "third"]
        for room, rid in enumerate(rids, 1):
            side.arrive(rid, room, max_new_tokens=NEW_TOKENS)
        finished = []
        for _ in range(40):
            side.poll()
            for rid in self.in_transfer(side):
                side.arrived(rid)
            side.turn()
            finished += [rid for rid in side.running() if rid not in finished]
        self.assertEqual(finished, rids)
        side.check_all_free()

    def test_a_retracted_request_that_has_grown_is_resumed(self):
        side = self.serve(setting=2)
        req = side.arrive("grown", 1, max_new_tokens=30)
        side.poll()
        side.arrived("grown")
        side.turns(6)
        self.assertEqual(side.running(), ["grown"])
        side.prealloc.num_reserved_decode_tokens = POOL - PROMPT
        side.retract(req)
        self.assertEqual(side.prealloc.retracted_queue, [req])
        side.poll()
        self.assertEqual(side.prealloc.retracted_queue, [])


if __name__ == "__main__":
    unittest.main()
