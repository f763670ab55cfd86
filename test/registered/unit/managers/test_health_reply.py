# SPDX-License-Identifier: Apache-2.0
"""A health endpoint reports a reply as it comes, and takes back a probe that got none."""

import asyncio
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from sglang.srt.entrypoints import http_server
from sglang.srt.managers import health_reply, io_struct, tokenizer_manager
from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput, HealthCheckOutput
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager
from sglang.test.ci.ci_register import register_cpu_ci

sys.path.insert(0, str(Path(__file__).parent))
from ipc_messages import build

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

HOURS = 3600.0


class Socket:
    """Both ends of the API process: what it sent to the scheduler, and what comes from there."""

    def __init__(self, on_message):
        self.on_message = on_message
        self.incoming = asyncio.Queue()

    def send_pyobj(self, message, **_):
        self.on_message(message)

    def send(self, data, **_):
        self.on_message(io_struct.msgpack_decode(data))

    async def recv_pyobj(self, **_):
        return await self.incoming.get()


class Sent:
    """What `_send_one_request` returns: awaited in later releases, the state in 0.5.9."""

    def __init__(self, rid):
        self.rid = rid

    def __await__(self):
        yield from ()


class Manager(TokenizerManager):
    """A real tokenizer manager without tokenizer, model and processes.

    `generate_request` and `handle_loop` are the release's own. `on_message` plays the scheduler.
    """

    def __init__(self, on_message):
        self.socket = Socket(lambda message: on_message(self, message))
        self.recv_from_detokenizer = self.send_to_scheduler = self.socket
        self.rid_to_state, self.asyncio_tasks = {}, set()
        self.event_loop = self.tokenizer_ipc_name = None
        self.server_status = ServerStatus.Up
        self.gracefully_exit = self.is_pause = self.enable_trace = False
        self.is_generation, self.is_image_gen = True, False
        self.last_receive_tstamp = 0.0
        self.is_pause_cond = asyncio.Condition()
        self.model_update_lock = tokenizer_manager.RWLock()
        self.elastic_worker_count = 1
        self.server_args = SimpleNamespace(
            disaggregation_mode="decode", tokenizer_worker_num=1, language_only=False, dp_size=1
        )
        self.generated = {}

    def __getattr__(self, name):
        if name == "_dispatch_to_scheduler":  # up to 0.5.14 there is none
            raise AttributeError(name)
        made = self.__dict__[name] = mock.MagicMock()
        return made

    def auto_create_handle_loop(self):
        if self.event_loop is None:
            self.event_loop = asyncio.get_running_loop()
            self.asyncio_tasks.add(asyncio.create_task(self.handle_loop()))

    def _init_req_state(self, obj, *_):
        self.rid_to_state[obj.rid] = self.generated[obj.rid] = SimpleNamespace(
            event=asyncio.Event(), dispatched=False, abort_sent=False
        )

    _req_stats_init = _init_req_state

    def _ignore(self, *_, **__):
        pass

    _set_default_priority = _validate_rid_not_in_flight = _ignore
    _raise_if_logical_request_aborted = _raise_if_logical_rid_aborted = _ignore
    _release_req_states_on_failure = _discard_pending_req_states = _ignore

    async def _validate_and_resolve_lora(self, _):
        pass

    async def _tokenize_one_request(self, obj):
        return obj

    def _send_one_request(self, obj, *_):
        if obj.rid not in self.generated:  # 0.5.9 makes the state here
            self._init_req_state(obj)
        self.socket.on_message(obj)
        return Sent(obj.rid)

    async def _wait_one_response(self, obj, *_):
        await self.generated[obj.rid].event.wait()
        yield {}

    def _handle_batch_output(self, message):
        for rid in message.rids:
            self.generated[rid].event.set()
        return Sent(None)

    def _result_dispatcher(self, message):
        if isinstance(message, BatchTokenIDOutput):
            self._handle_batch_output(message)

    def deliver(self, message):
        """Let a message come from the scheduler."""
        self.socket.incoming.put_nowait(message)


def is_request(message):
    return isinstance(message, io_struct.GenerateReqInput)


class HealthReplyTest(unittest.IsolatedAsyncioTestCase):
    """Calls the real endpoint on a real tokenizer manager, with the test as the scheduler."""

    limit_s = 1
    look_s = 0.05

    def setUp(self):
        self.sent = []
        disagg = SimpleNamespace(disaggregation_mode="decode", language_only=False)
        serving = SimpleNamespace(tokenizer_worker_num=1, enable_strict_thinking=False)
        for module in (http_server, tokenizer_manager):
            self.replace(module, "get_disagg", lambda: disagg)
            self.replace(module, "get_serving", lambda: serving)
        self.replace(tokenizer_manager, "async_sock_recv", lambda socket: socket.recv_pyobj())
        self.replace(http_server, "HEALTH_CHECK_TIMEOUT", self.limit_s)
        self.replace(health_reply, "LOOK_S", self.look_s)

    def replace(self, owner, name, value):
        if hasattr(owner, name):
            patch = mock.patch.object(owner, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def serve(self, on_message=lambda manager, message: None):
        """A manager whose messages go to `on_message`, which may deliver replies."""

        def note(manager, message):
            self.sent.append(message)
            on_message(manager, message)

        self.manager = Manager(note)
        self.replace(http_server, "_global_state", SimpleNamespace(tokenizer_manager=self.manager))
        self.addCleanup(lambda: [task.cancel() for task in self.manager.asyncio_tasks])
        return self.manager

    async def ask(self, path="/health_generate"):
        request = SimpleNamespace(url=SimpleNamespace(path=path), headers={})
        response = await asyncio.wait_for(http_server.health_generate(request), timeout=60)
        for _ in range(5):  # let what was cancelled end
            await asyncio.sleep(0)
        return response.status_code

    def sent_types(self):
        return [type(message).__name__ for message in self.sent]

    def assert_nothing_is_left(self):
        self.assertEqual(self.manager.rid_to_state, {})
        self.assertEqual(health_reply._probes, {})


def acknowledge(manager, message):
    """A busy scheduler that turns: it answers each question at once."""
    if is_request(message) or isinstance(message, HealthCheckOutput):
        manager.deliver(HealthCheckOutput(rid=message.rid))


def generate(manager, message):
    """A scheduler at rest: it generates the token."""
    if is_request(message):
        manager.deliver(build(BatchTokenIDOutput, rids=[message.rid]))


def only_echo(manager, message):
    """A scheduler that turns, and keeps every request waiting."""
    if isinstance(message, HealthCheckOutput):
        manager.deliver(HealthCheckOutput(rid=message.rid))


class TestReply(HealthReplyTest):
    look_s = HOURS

    async def test_the_endpoint_wakes_on_the_reply_and_sleeps_for_none(self):
        for reply in (acknowledge, generate):
            with self.subTest(reply.__name__):
                self.serve(reply)
                naps = []
                real_sleep = asyncio.sleep

                async def sleep(seconds, *rest, naps=naps, real_sleep=real_sleep):
                    naps.append(seconds)
                    await real_sleep(0, *rest)

                with mock.patch.object(asyncio, "sleep", sleep):
                    self.assertEqual(await self.ask(), 200)
                self.assertEqual([seconds for seconds in naps if seconds], [])
                self.assert_nothing_is_left()

    async def test_a_late_reply_is_seen_without_looking_twice(self):
        def answer_later(manager, message):
            asyncio.get_running_loop().call_later(0.05, acknowledge, manager, message)

        self.serve(answer_later)
        with mock.patch.object(health_reply, "look", wraps=health_reply.look) as look:
            self.assertEqual(await self.ask(), 200)
        self.assertEqual(look.call_count, 1)

    async def test_an_answered_probe_is_not_withdrawn(self):
        for reply in (acknowledge, generate):
            self.sent.clear()
            self.serve(reply)
            await self.ask()
            self.assertEqual(self.sent_types(), ["GenerateReqInput"])

    async def test_an_aborted_probe_was_answered(self):
        def abort(manager, message):
            manager.deliver(build(AbortReq, rid=message.rid))

        self.serve(abort)
        self.assertEqual(await self.ask(), 200)

    async def test_many_probes_at_once_are_each_answered(self):
        held = []

        def answer_all_in_the_end(manager, message):
            held.append(message)
            if len(held) == 20:
                for one in held:
                    acknowledge(manager, one)

        self.serve(answer_all_in_the_end)
        replies = await asyncio.gather(*(self.ask() for _ in range(20)))
        self.assertEqual(replies, [200] * 20)
        self.assert_nothing_is_left()

    async def test_a_pause_does_not_hold_the_probe_back(self):
        self.serve(acknowledge).is_pause = True
        self.assertEqual(await self.ask(), 200)
        self.assertEqual(self.sent_types()[0], "HealthCheckOutput")
        self.assertFalse(any(map(is_request, self.sent)))
        self.assert_nothing_is_left()

    async def test_a_weight_update_that_waits_for_its_turn_does_not_hold_the_probe_back(self):
        manager = self.serve(acknowledge)
        async with manager.model_update_lock.reader_lock:  # a long request of somebody
            update = asyncio.create_task(manager.model_update_lock.acquire_writer())
            while not manager.model_update_lock._waiting_writers:
                await asyncio.sleep(0)
            self.assertEqual(await self.ask(), 200)
        await update


class TestNoReply(HealthReplyTest):
    async def test_a_stopped_scheduler_fails_at_the_limit_and_recovers(self):
        manager = self.serve()
        self.assertEqual(await self.ask(), 503)
        self.assertIs(manager.server_status, ServerStatus.UnHealthy)
        manager.socket.on_message = lambda message: acknowledge(manager, message)
        self.assertEqual(await self.ask(), 200)
        self.assertIs(manager.server_status, ServerStatus.Up)

    async def test_a_probe_without_reply_is_withdrawn_everywhere(self):
        self.serve()
        await self.ask()
        asked, *rest = self.sent
        self.assertEqual([type(message) for message in rest], [AbortReq])
        self.assertEqual(rest[0].rid, asked.rid)
        self.assert_nothing_is_left()

    async def test_a_backlog_of_other_replies_does_not_keep_a_stopped_scheduler_healthy(self):
        def backlog(manager, message):
            for delay in range(1, 30):
                other = build(HealthCheckOutput, rid="somebody else's")
                asyncio.get_running_loop().call_later(delay / 20, manager.deliver, other)

        self.serve(backlog)
        self.assertEqual(await self.ask(), 503)
        self.assertEqual(self.sent_types()[-1], "AbortReq")
        self.assertGreater(self.manager.last_receive_tstamp, 0)

    async def test_a_request_held_up_by_others_does_not_fail_a_loop_that_turns(self):
        def busy(manager, message):
            manager.deliver(build(HealthCheckOutput, rid="somebody else's"))
            only_echo(manager, message)

        self.serve(busy)
        self.assertEqual(await self.ask(), 200)
        kinds = ["GenerateReqInput", "HealthCheckOutput", "AbortReq"]
        self.assertEqual(self.sent_types(), kinds)
        self.assert_nothing_is_left()

    async def test_a_pause_that_comes_after_the_probe_does_not_fail_it(self):
        def pause_then_echo(manager, message):
            manager.is_pause = True
            only_echo(manager, message)

        self.serve(pause_then_echo)
        self.assertEqual(await self.ask(), 200)

    async def test_an_idle_server_that_cannot_generate_fails(self):
        self.serve(only_echo)
        self.assertEqual(await self.ask(), 503)
        self.assertEqual(self.sent_types(), ["GenerateReqInput", "AbortReq"])

    async def test_a_probe_that_cannot_be_sent_fails_at_the_limit_without_spinning(self):
        manager = self.serve()
        manager._tokenize_one_request = mock.AsyncMock(side_effect=ValueError("no tokenizer"))
        with mock.patch.object(health_reply, "look", wraps=health_reply.look) as look:
            self.assertEqual(await self.ask(), 503)
        self.assertLessEqual(look.call_count, self.limit_s / self.look_s + 1)
        self.assert_nothing_is_left()


class TestSwitches(HealthReplyTest):
    look_s = HOURS

    async def test_the_switch_makes_health_alone_a_constant(self):
        self.serve(acknowledge)
        switch = http_server.envs.SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION
        with switch.override(False):
            self.assertEqual(await self.ask("/health"), 200)
            self.assertEqual(self.sent, [])
            self.assertEqual(await self.ask("/health_generate"), 200)
            self.assertEqual(self.sent_types(), ["GenerateReqInput"])
        self.assertEqual(await self.ask("/health"), 200)
        self.assertEqual(self.sent_types(), ["GenerateReqInput"] * 2)

    async def test_a_server_that_starts_or_ends_is_unhealthy_without_a_probe(self):
        manager = self.serve(acknowledge)
        manager.server_status = ServerStatus.Starting
        self.assertEqual(await self.ask(), 503)
        manager.server_status, manager.gracefully_exit = ServerStatus.Up, True
        self.assertEqual(await self.ask(), 503)
        self.assertEqual(self.sent, [])


class TestApiWorkers(HealthReplyTest):
    async def test_what_a_worker_asks_carries_its_name(self):
        if not hasattr(TokenizerManager, "_dispatch_to_scheduler"):
            self.skipTest("up to 0.5.14 the worker's socket writes the name")
        manager = self.serve()
        manager.tokenizer_ipc_name = "ipc://worker-3"
        manager.is_pause = True
        await self.ask()
        self.assertEqual({message.http_worker_ipc for message in self.sent}, {"ipc://worker-3"})


class TestCost(unittest.TestCase):
    def test_a_message_costs_nothing_while_no_probe_waits(self):
        class Unread:
            def __getattribute__(self, name):
                raise AssertionError(f"read {name}")

        health_reply.received(Unread())


if __name__ == "__main__":
    unittest.main()
