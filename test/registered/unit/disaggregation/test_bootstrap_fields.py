# SPDX-License-Identifier: Apache-2.0
"""No request enters a half of a pair with fields that end it, or in another request's room."""

import asyncio
import inspect
import unittest
from types import SimpleNamespace

from sglang.srt.disaggregation import bootstrap_fields
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

ADDRESS = {
    "bootstrap_host": "10.0.0.7",
    "bootstrap_port": 8998,
    "disagg_prefill_dp_rank": None,
}


class Passed(Exception):
    """The request got past the entry."""


def manager(mode, backend="mooncake"):
    """A real tokenizer manager that goes no further than the entry."""

    made = TokenizerManager.__new__(TokenizerManager)
    made.disaggregation_mode = DisaggregationMode(mode)
    made.server_args = SimpleNamespace(disaggregation_transfer_backend=backend)
    made.rid_to_state = {}
    made.bootstrap_rooms = bootstrap_fields.Rooms()
    return made


class Request(SimpleNamespace):
    """A tokenized request; what else is read of it means that it got past the entry."""

    def __init__(self, room=7, rid="r", **fields):
        super().__init__(bootstrap_room=room, rid=rid, **{**ADDRESS, **fields})

    def __getattr__(self, name):
        raise Passed(name)


def send(entry, requests):
    """Call `_send_one_request` or `_send_batch_request` with the arguments of this release."""
    values = {"tokenized_obj": requests[0], "tokenized_objs": requests, "created_time": 0.0}
    values["obj"] = requests[0] if entry.__name__ == "_send_one_request" else requests
    named = [name for name in inspect.signature(entry).parameters if name in values]
    result = entry(*(values[name] for name in named))
    if inspect.isawaitable(result):
        asyncio.run(result)


def enter(owner, *requests):
    """Send tokenized requests: together when there is more than one."""
    entry = owner._send_batch_request if len(requests) > 1 else owner._send_one_request
    try:
        send(entry, list(requests))
    except (Passed, AttributeError):  # what a bare manager lacks comes after the entry
        for request in requests:
            owner.rid_to_state[request.rid] = object()


class TestFields(unittest.TestCase):
    def refused(self, words, request, *modes):
        for mode in modes or ("prefill", "decode"):
            with self.subTest(mode=mode), self.assertRaisesRegex(ValueError, words):
                enter(manager(mode), request)

    def test_a_room_is_a_number_that_a_row_can_hold_and_not_its_empty_mark(self):
        for room in (0, -1, -7, 2**64, 2**64 + 3, True, "7", 7.0):
            self.refused("bootstrap_room must be a number", Request(room))
        self.refused("bootstrap_room is missing", Request(None))
        for room in (1, 2**63 - 1, 2**63, 2**64 - 1):
            for mode in ("prefill", "decode"):
                bootstrap_fields.admit(manager(mode), Request(room))

    def test_decode_has_to_know_where_its_prefill_is(self):
        self.refused("bootstrap_host is missing", Request(bootstrap_host=None), "decode")
        for host in ("", " ", "a b", "host/x", "user@host", "h?x", "a\nb", 5, "x" * 300):
            self.refused("bootstrap_host must be", Request(bootstrap_host=host))
        for port in (0, -1, 65536, True, "8998", 1.5):
            self.refused("bootstrap_port must be", Request(bootstrap_port=port))
        self.refused("disagg_prefill_dp_rank", Request(disagg_prefill_dp_rank=-1))

    def test_usual_addresses_are_taken(self):
        for host in ("10.0.0.7", "prefill-0.pool.svc", "localhost", "::1", "[fe80::1]", "my_host"):
            bootstrap_fields.admit(manager("decode"), Request(bootstrap_host=host))
        bootstrap_fields.admit(manager("decode"), Request(bootstrap_port=None))
        bootstrap_fields.admit(
            manager("prefill"), Request(bootstrap_host=None, bootstrap_port=None)
        )

    def test_probes_and_servers_without_a_peer_are_left_alone(self):
        for mode in ("prefill", "decode"):
            probe = Request(0, bootstrap_host=FAKE_BOOTSTRAP_HOST)
            bootstrap_fields.admit(manager(mode), probe)
            bootstrap_fields.admit(manager(mode, "fake"), Request(None, bootstrap_host=None))
        bootstrap_fields.admit(manager("null"), Request(-5, bootstrap_host=None))
        self.assertEqual(bootstrap_fields.FAKE_HOST, FAKE_BOOTSTRAP_HOST)


class TestRooms(unittest.TestCase):
    def test_a_room_under_way_is_refused_and_its_owner_unharmed(self):
        for mode in ("prefill", "decode"):
            owner = manager(mode)
            enter(owner, Request(7, "first"))
            with self.assertRaisesRegex(ValueError, "bootstrap_room 7 is in use by request first"):
                enter(owner, Request(7, "second"))
            self.assertEqual(owner.bootstrap_rooms.owners, {7: "first"})
            enter(owner, Request(8, "third"))

    def test_a_room_is_free_again_when_its_request_is_over(self):
        owner = manager("decode")
        enter(owner, Request(7, "first"))
        del owner.rid_to_state["first"]
        enter(owner, Request(7, "second"))
        self.assertEqual(owner.bootstrap_rooms.owners, {7: "second"})

    def test_a_batch_is_refused_as_a_whole(self):
        owner = manager("prefill")
        with self.assertRaisesRegex(ValueError, "bootstrap_room 7 is given to two"):
            enter(owner, Request(7, "a"), Request(8, "b"), Request(7, "c"))
        self.assertEqual(owner.bootstrap_rooms.owners, {})
        with self.assertRaisesRegex(ValueError, "must be a number"):
            enter(owner, Request(7, "a"), Request(-1, "b"))
        self.assertEqual(owner.bootstrap_rooms.owners, {})
        enter(owner, Request(7, "a"), Request(8, "b"))
        self.assertEqual(owner.bootstrap_rooms.owners, {7: "a", 8: "b"})

    def test_rooms_of_finished_requests_do_not_pile_up(self):
        rooms = bootstrap_fields.Rooms()
        under_way = {"live": object()}
        rooms.claim(1, "live", under_way)
        for room in range(2, 10 * bootstrap_fields.SLACK):
            rooms.claim(room, f"r{room}", under_way)
            rooms.sweep(under_way)
            self.assertLessEqual(len(rooms.owners), bootstrap_fields.SLACK + 2)
        self.assertEqual(rooms.owners[1], "live")


if __name__ == "__main__":
    unittest.main()
