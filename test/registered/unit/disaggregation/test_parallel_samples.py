# SPDX-License-Identifier: Apache-2.0
"""Every sample of a prompt has a room of its own, and both halves give it the same one."""

import asyncio
import contextlib
import dataclasses
import inspect
import unittest
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import msgspec
from sglang.srt.disaggregation import parallel_samples
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

ROOM = 0x1234_5678_9ABC_DEF0


def build(cls, **values):
    """An IPC message of this release: the given fields, and None for whatever else it requires."""
    if dataclasses.is_dataclass(cls):
        missing = [
            field.name
            for field in dataclasses.fields(cls)
            if field.default is field.default_factory is dataclasses.MISSING
        ]
    else:
        missing = [field.name for field in msgspec.structs.fields(cls) if field.required]
    return cls(**{**dict.fromkeys(missing), **values})


class Manager(TokenizerManager):
    """A real tokenizer manager; tokenizing, sending and waiting are the test's."""

    def __init__(self, mode):
        self.disaggregation_mode = DisaggregationMode(mode)
        self.rid_to_state = defaultdict(mock.MagicMock)
        self.sent = []

    async def _tokenize_one_request(self, obj):
        return build(
            TokenizedGenerateReqInput,
            rid=obj.rid,
            input_ids=obj.input_ids,
            sampling_params=SamplingParams(max_new_tokens=8),
            bootstrap_host=obj.bootstrap_host,
            bootstrap_room=obj.bootstrap_room,
            stream=obj.stream,
        )

    def _send_one_request(self, *given):
        self.sent.append(next(g for g in given if isinstance(g, TokenizedGenerateReqInput)))
        return Awaited()

    async def _wait_one_response(self, obj, *_):
        yield {"meta_info": {"id": obj.rid}}

    def _init_req_state(self, *_, **__):
        pass

    _init_child_req_state = _raise_if_logical_rid_aborted = _init_req_state


class Awaited:
    """What `_send_one_request` returns: awaited in later releases, a state in earlier ones."""

    def __await__(self):
        yield from ()


def expand(mode, stream=False, prompts=((5, 6, 7),), samples=3, **fields):
    """Messages to the scheduler and replies for one request with `n`."""
    request = GenerateReqInput(
        input_ids=[list(prompt) for prompt in prompts],
        sampling_params={"n": samples},
        bootstrap_host="10.0.0.7",
        stream=stream,
        **{"bootstrap_room": ROOM, **fields},
    )
    request.normalize_batch_and_arguments()
    manager = Manager(mode)
    extra = {"request_states": defaultdict(mock.MagicMock), "created_time": 0.0}
    known = inspect.signature(TokenizerManager._handle_batch_request).parameters
    given = {name: value for name, value in extra.items() if name in known}

    async def replies():
        return [each async for each in manager._handle_batch_request(request, None, **given)]

    return manager.sent, asyncio.run(replies())


class TestRooms(unittest.TestCase):
    def test_no_two_samples_share_a_room(self):
        for mode in ("prefill", "decode"):
            sent, _ = expand(mode)
            samples = [each for each in sent if each.bootstrap_host != FAKE_BOOTSTRAP_HOST]
            rooms = [each.bootstrap_room for each in samples]
            self.assertEqual(len(rooms), 3)
            self.assertEqual(len(set(rooms)), 3)
            self.assertEqual(rooms[0], ROOM)
            self.assertEqual(len({each.rid for each in sent}), len(sent))

    def test_both_halves_give_a_sample_the_same_room(self):
        rooms = [
            [s.bootstrap_room for s in expand(mode)[0] if s.bootstrap_host != FAKE_BOOTSTRAP_HOST]
            for mode in ("prefill", "decode")
        ]
        self.assertEqual(*rooms)

    def test_every_prompt_of_a_batch_has_samples_in_rooms_of_their_own(self):
        sent, replies = expand(
            "decode", prompts=((5, 6), (7, 8, 9)), samples=2, bootstrap_room=[21, 22]
        )
        self.assertEqual([each.bootstrap_room for each in sent][::2], [21, 22])
        self.assertEqual(len({each.bootstrap_room for each in sent}), 4)
        self.assertEqual(len(replies[0]), 4)

    def test_a_chain_of_rooms_does_not_come_back_and_keeps_the_rank(self):
        for room in (1, 7, 2**16, 2**63 - 1, 2**64 - 1, ROOM):
            seen, current = set(), room
            for _ in range(2000):
                self.assertTrue(0 < current < 2**64)
                self.assertEqual(current % 64, room % 64)
                self.assertNotIn(current, seen)
                seen.add(current)
                current = parallel_samples.next_room(current)


class TestWarmUp(unittest.TestCase):
    def test_prefill_caches_the_prompt_once_and_transfers_nothing_for_it(self):
        sent, _ = expand("prefill")
        self.assertEqual(len(sent), 4)
        self.assertEqual(sent[0].bootstrap_host, FAKE_BOOTSTRAP_HOST)
        self.assertEqual(sent[0].sampling_params.max_new_tokens, 0)
        self.assertEqual({each.bootstrap_host for each in sent[1:]}, {"10.0.0.7"})
        self.assertEqual({each.sampling_params.max_new_tokens for each in sent[1:]}, {8})

    def test_decode_sends_the_samples_alone(self):
        sent, _ = expand("decode")
        self.assertEqual(len(sent), 3)
        self.assertEqual({each.sampling_params.max_new_tokens for each in sent}, {8})

    def test_an_aggregated_server_does_as_before(self):
        sent, _ = expand("null", bootstrap_room=None)
        self.assertEqual(len(sent), 4)
        self.assertEqual({each.bootstrap_room for each in sent}, {None})

    def test_the_prompt_stays_in_prefills_cache(self):
        for room, skipped in ((ROOM, False), (0, True), (None, True)):
            req = SimpleNamespace(
                bootstrap_host=FAKE_BOOTSTRAP_HOST,
                bootstrap_room=room,
                skip_radix_cache_insert=True,
            )
            queue = PrefillBootstrapQueue.__new__(PrefillBootstrapQueue)
            with contextlib.suppress(AttributeError):  # a bare queue gets no further
                queue.add(req, 1)
            self.assertEqual(req.skip_radix_cache_insert, skipped)

    def test_the_fake_host_is_the_runtimes(self):
        self.assertEqual(parallel_samples.FAKE_HOST, FAKE_BOOTSTRAP_HOST)


class TestReplies(unittest.TestCase):
    def test_a_reply_for_each_sample(self):
        for mode in ("prefill", "decode"):
            _, replies = expand(mode)
            self.assertEqual(len(replies[0]), 3)

    def test_streamed_replies_carry_the_index_of_their_sample(self):
        for mode in ("prefill", "decode"):
            _, replies = expand(mode, stream=True)
            self.assertEqual(sorted(each["index"] for each in replies), [0, 1, 2])


if __name__ == "__main__":
    unittest.main()
