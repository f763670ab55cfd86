# SPDX-License-Identifier: Apache-2.0
"""The last chunk's metadata goes out once on every backend, with pages, state, both or neither."""

import itertools
import sys
import unittest
from pathlib import Path

from sglang.srt.disaggregation import final_chunk
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.test.ci.ci_register import register_cpu_ci

sys.path.insert(0, str(Path(__file__).parent))
import transfer_ends as ends

register_cpu_ci(est_time=20, suite="base-a-test-cpu")


class TestEveryBackend(unittest.TestCase):
    def on_each(self, check, *args, **kwargs):
        """`check` a transfer over every backend."""
        for backend in ends.BACKENDS:
            with self.subTest(backend=backend.name):
                transfer = backend(*args, **kwargs)
                if transfer.sends_state or not transfer.state:
                    check(transfer)

    def assert_finished(self, transfer):
        self.assertEqual(transfer.wire.count("aux"), 1)
        self.assertEqual(transfer.status, KVPoll.Success)
        self.assertTrue(transfer.decode_is_done())

    def test_metadata_follows_the_last_chunk_whatever_it_carries(self):
        for pages, state in itertools.product((0, 3), (None, [], [1])):

            def check(transfer, pages=pages, state=state):
                transfer.chunk(pages, last=True, state=state)
                self.assert_finished(transfer)
                self.assertEqual(transfer.wire.count("kv") > 0, pages > 0)
                self.assertEqual(transfer.wire.count("state") > 0, state == [1])

            with self.subTest(pages=pages, state=state):
                self.on_each(check, pages, state)

    def test_a_middle_chunk_sends_pages_and_nothing_else(self):
        def check(transfer):
            transfer.chunk(2)
            self.assertEqual({kind for kind, _ in transfer.wire.writes}, {"kv"})
            self.assertNotEqual(transfer.status, KVPoll.Success)
            transfer.chunk(1, last=True, state=[1])
            self.assert_finished(transfer)

        self.on_each(check, 3, state=[1])

    def test_a_middle_chunk_without_pages_sends_nothing(self):
        def check(transfer):
            transfer.chunk(0)
            self.assertEqual((transfer.wire.writes, transfer.wire.notices), ([], []))
            transfer.chunk(2, last=True)
            self.assert_finished(transfer)

        self.on_each(check, 2)

    def test_ranks_that_hold_no_page_of_a_chunk_finish_too(self):
        for rank, chunks in itertools.product((0, 1), ((1, 1), (2, 2), (1, 1, 2))):

            def check(transfer, chunks=chunks):
                for index, pages in enumerate(chunks, 1):
                    transfer.chunk(pages, last=index == len(chunks))
                self.assert_finished(transfer)

            with self.subTest(rank=rank, chunks=chunks):
                self.on_each(check, sum(chunks), cp_rank=rank)


class TestFailures(unittest.TestCase):
    def test_state_that_does_not_arrive_is_a_failed_transfer(self):
        for backend in ends.BACKENDS:
            with self.subTest(backend=backend.name):
                transfer = backend(2, state=[1])
                if not transfer.sends_state:
                    continue
                transfer.wire.breaks = {"state"}
                transfer.chunk(2, last=True, state=[1])
                self.assertEqual(transfer.status, KVPoll.Failed)
                self.assertFalse(transfer.decode_is_done())

    def test_counts_that_disagree_fail_at_once_and_name_the_request(self):
        for backend in ends.BACKENDS:
            with self.subTest(backend=backend.name):
                # Decode holds 17 tokens of 49: two pages are due, and three begin in two chunks.
                transfer = backend(pages=2)
                on = ends.scheduler()
                first = ends.request(transfer.sender, prompt=49, start=17, end=32)
                last = ends.request(transfer.sender, prompt=49, start=32)
                ends.send_kv_chunk(on, first, last=False)
                with self.assertLogs(final_chunk.logger, "ERROR") as logs:
                    ends.send_kv_chunk(on, last, last=True)
                # Up to 0.5.11 NIXL refuses the third page itself, by the room.
                self.assertRegex("".join(logs.output), "long-prompt|room 7")
                self.assertEqual(transfer.status, KVPoll.Failed)


class TestScheduler(unittest.TestCase):
    def test_a_prompt_that_is_sent_already_still_gets_its_last_chunk(self):
        for prompt in (ends.PAGE, 4 * ends.PAGE):
            with self.subTest(prompt=prompt):
                fake = ends.Fake()
                ends.send_kv_chunk(
                    ends.scheduler(), ends.request(fake.sender, prompt, start=prompt), last=True
                )
                self.assertEqual(fake.sent, [0])
                self.assertEqual(fake.sender.poll(), KVPoll.Success)

    def test_a_last_chunk_that_begins_after_its_end_is_empty(self):
        fake = ends.Fake()
        ends.send_kv_chunk(ends.scheduler(), ends.request(fake.sender, 64, start=80), last=True)
        self.assertEqual(fake.sent, [0])
        self.assertEqual(fake.sender.poll(), KVPoll.Success)

    def test_the_sender_of_warm_up_requests_speaks_as_the_others_do(self):
        for pages, last in itertools.product((0, 3), (False, True)):
            with self.subTest(pages=pages, last=last):
                fake = ends.Fake()
                end = 4 * ends.PAGE
                prompt = end if last else 2 * end
                req = ends.request(fake.sender, prompt, start=end - pages * ends.PAGE, end=end)
                ends.send_kv_chunk(ends.scheduler(), req, last=last)
                self.assertEqual(fake.sent, [pages] if pages or last else [])

    def test_a_middle_chunk_inside_what_decode_holds_is_not_sent(self):
        for start, end in ((64, 64), (64, 32), (0, 15)):
            with self.subTest(start=start, end=end):
                fake = ends.Fake()
                req = ends.request(fake.sender, 128, start=start, end=end)
                ends.send_kv_chunk(ends.scheduler(), req, last=False)
                self.assertEqual(fake.sent, [])


if __name__ == "__main__":
    unittest.main()
