# SPDX-License-Identifier: Apache-2.0
"""A health probe is answered in the pass it arrives in, unless the server is at rest."""

import contextlib
import importlib.util
import itertools
import sys
import threading
import unittest
from collections import deque
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import health_probe, io_struct, scheduler, scheduler_pp_mixin
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    HealthCheckOutput,
    PauseGenerationReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

if importlib.util.find_spec("sglang.srt.managers.scheduler_components"):  # from 0.5.13 on
    from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper

    HAS_COMPONENTS = True
else:
    from sglang.srt.managers.scheduler import SenderWrapper

    HAS_COMPONENTS = False

sys.path.insert(0, str(Path(__file__).parent))
from ipc_messages import build

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

DECODE, PREFILL, NULL = (DisaggregationMode(mode) for mode in ("decode", "prefill", "null"))
# Each state of the matrix, with the mode in which it exists.
PLACES = {
    "prealloc": DECODE,
    "transfer": DECODE,
    "waiting": DECODE,
    "retracted": DECODE,
    "running": DECODE,
    "inflight": PREFILL,
    "bootstrap": PREFILL,
}
LOOPS = {
    DECODE: (
        "event_loop_normal_disagg_decode",
        "event_loop_overlap_disagg_decode",
        "event_loop_pp_disagg_decode",
    ),
    PREFILL: (
        "event_loop_normal_disagg_prefill",
        "event_loop_overlap_disagg_prefill",
        "event_loop_pp_disagg_prefill",
    ),
    NULL: ("event_loop_normal", "event_loop_overlap", "event_loop_pp"),
}


class StepOver(Exception):
    """Ends a loop where its step would go on."""


class Socket:
    """The socket to the API process; keeps what was sent."""

    def __init__(self):
        self.sent = []

    def send_pyobj(self, message, **_):
        self.sent.append(message)

    def send(self, data, **_):
        self.sent.append(io_struct.msgpack_decode(data))


def probe(number=1, cls=TokenizedGenerateReqInput, prompt=(0,), max_new_tokens=1):
    return build(
        cls,
        rid=f"{health_probe.RID_PREFIX}_{number}",
        http_worker_ipc=f"ipc://worker-{number}",
        input_ids=list(prompt),
        sampling_params=SamplingParams(max_new_tokens=max_new_tokens),
    )


def request(rid="a user's request"):
    message = probe(prompt=range(9), max_new_tokens=99)
    message.rid = rid
    return message


def batch(requests=0):
    made = ScheduleBatch.__new__(ScheduleBatch)
    made.reqs = [SimpleNamespace(rid=f"r{i}") for i in range(requests)]
    return made


def parked(requests):
    return [SimpleNamespace(rid=f"r{i}", req=SimpleNamespace(rid=f"r{i}")) for i in range(requests)]


class World:
    """A real scheduler of this release with real queues, and what it dispatched and sent."""

    def __init__(self, mode=DECODE, socket=True, first_stage=True, **places):
        self.socket = Socket() if socket else None
        self.dispatched = []
        self.inbox = []
        self.relayed = None
        self.scheduler = made = Scheduler.__new__(Scheduler)
        sender = SenderWrapper(self.socket)
        if HAS_COMPONENTS:
            made.ipc_channels = SimpleNamespace(send_to_tokenizer=sender, recv_from_rpc=None)
            made.weight_updater = SimpleNamespace(offload_tags=set())
            made.ps = SimpleNamespace(pp_size=1, pp_rank=0, attn_tp_rank=0, attn_cp_rank=0)
        else:
            made.send_to_tokenizer, made.recv_from_rpc = sender, None
            made.offload_tags = set()
            made.pp_size, made.pp_rank = 1, 0
        made.pp_group = SimpleNamespace(is_first_rank=first_stage, is_last_rank=True)
        made._engine_paused = made.gracefully_exit = False
        made._request_dispatcher = self.dispatched.append
        made.session_controller = made.flush_wrapper = made.metrics_reporter = mock.MagicMock()
        made._check_pending_flush = made._record_scheduler_state_for_paused_engine = lambda: None
        made.external_corpus_manager = made.rust_server = made.scheduler_stage_metrics = None
        made.return_health_check_ct, made.return_health_check_ipcs = 0, deque()
        made.enable_overlap = False
        made.dllm_manager = SimpleNamespace(any_staging_reqs=lambda: False)
        made.chunked_req = made.last_batch = made.cur_batch = None
        made.running_mbs, made.mbs = [], []
        made.grammar_manager = SimpleNamespace(grammar_queue=[])
        made.decode_offload_manager = None
        made.enable_hisparse = made.enable_hierarchical_cache = made.enable_lmcache = False

        made.disaggregation_mode = mode
        made.waiting_queue = parked(places.pop("waiting", 0))
        made.running_batch = batch(places.pop("running", 0))
        if mode is DECODE:
            prealloc = DecodePreallocQueue.__new__(DecodePreallocQueue)
            prealloc.queue = parked(places.pop("prealloc", 0))
            prealloc.retracted_queue = parked(places.pop("retracted", 0))
            prealloc.pending_reqs = []
            transfer = DecodeTransferQueue.__new__(DecodeTransferQueue)
            transfer.queue = parked(places.pop("transfer", 0))
            transfer._deferred_releases = []
            made.disagg_decode_prealloc_queue = prealloc
            made.disagg_decode_transfer_queue = transfer
        elif mode is PREFILL:
            bootstrap = PrefillBootstrapQueue.__new__(PrefillBootstrapQueue)
            bootstrap.queue = parked(places.pop("bootstrap", 0))
            made.disagg_prefill_bootstrap_queue = bootstrap
            made.disagg_prefill_inflight_queue = parked(places.pop("inflight", 0))
        assert not places, f"{places} do not exist in {mode}"

    def turn(self, *messages):
        """One pass over the messages; the list that a pipeline stage would relay."""
        received = list(messages)
        self.scheduler.process_input_requests(received)
        return received

    def replies(self):
        return [(message.rid, message.http_worker_ipc) for message in self.socket.sent]

    def state(self):
        """Everything a request can be in, entry by entry."""
        made = self.scheduler
        held = [made.waiting_queue, made.running_batch.reqs]
        if made.disaggregation_mode is DECODE:
            prealloc = made.disagg_decode_prealloc_queue
            transfer = made.disagg_decode_transfer_queue
            held += [prealloc.queue, prealloc.retracted_queue, transfer.queue]
        elif made.disaggregation_mode is PREFILL:
            held += [made.disagg_prefill_bootstrap_queue.queue, made.disagg_prefill_inflight_queue]
        return [[id(entry) for entry in place] for place in held]

    def run(self, loop, step):
        """Run one of the scheduler's real loops on the inbox until `step` raises `StepOver`."""
        made = self.scheduler

        def receive(*_, **__):
            received, self.inbox[:] = list(self.inbox), []
            return received

        def process(messages):
            self.relayed = messages  # what a pipeline loop passes on when it was looked at
            Scheduler.process_input_requests(made, messages)

        if HAS_COMPONENTS:
            made.request_receiver = SimpleNamespace(recv_requests=receive)
        else:
            made.recv_requests = receive
        made.process_input_requests = process
        made._deferred_input_requests = []
        made._poll_timeout_aborts = list
        made._is_continuous_input_polling_enabled = lambda: False
        made._apply_war_barrier = made._yield_gil_if_needed = lambda: None
        made._war_barrier_enabled = False
        made.process_decode_queue = made.get_next_batch_to_run = step
        if made.disaggregation_mode is DECODE:
            made.disagg_decode_prealloc_queue.prefetch_prefill_dp_rank_queries = lambda: None
        elif made.disaggregation_mode is PREFILL:
            made.disagg_prefill_bootstrap_queue.pop_bootstrapped = step
        if "_pp" in loop:
            self.prepare_pipeline(step)
        with contextlib.suppress(StepOver):
            getattr(made, loop)()

    def prepare_pipeline(self, step):
        """The first of several stages, which does `step` before it relays what came in."""
        made = self.scheduler
        made.pp_group.is_last_rank = False
        made.pp_loop_size, made.running_mbs = 1, [made.running_batch]
        made.mbs, made.last_mbs, made.send_req_work = [None], [None], []
        made.init_pp_loop_state = lambda: None
        made._pp_commit_comm_work = lambda *_: None
        made._pp_send_pyobj_to_next_stage = made._pp_pd_get_retract_ids = step
        made._pp_pd_get_bootstrapped_ids = made._pp_pd_get_prefill_transferred_ids = step


class HealthCheckTest(unittest.TestCase):
    """Runs a scheduler without the process-wide configuration it reads in later releases."""

    def setUp(self):
        parallel = SimpleNamespace(pp_size=1, pp_rank=0, attn_tp_rank=0, attn_cp_rank=0)
        known = {
            "get_parallel": parallel,
            "get_disagg": SimpleNamespace(enable_pd_role_switch=False),
            "get_mm": SimpleNamespace(mm_feature_transport="default"),
        }
        for module, (name, value) in itertools.product(
            (scheduler, scheduler_pp_mixin), known.items()
        ):
            if hasattr(module, name):
                patch = mock.patch.object(module, name, lambda value=value: value)
                patch.start()
                self.addCleanup(patch.stop)


class TestBusyServer(HealthCheckTest):
    def test_a_probe_is_answered_in_the_same_pass_wherever_requests_are(self):
        for place, mode in PLACES.items():
            with self.subTest(place=place):
                world = World(mode, **{place: 5})
                before = world.state()
                relayed = world.turn(probe(1), probe(2), probe(3))
                wanted = [
                    (f"{health_probe.RID_PREFIX}_{n}", f"ipc://worker-{n}") for n in (1, 2, 3)
                ]
                self.assertEqual(world.replies(), wanted)
                self.assertEqual(world.dispatched, [])
                self.assertEqual(relayed, [])
                self.assertEqual(world.state(), before)

    def test_every_mixture_of_decode_states_is_answered_and_leaves_the_state(self):
        places = [place for place, mode in PLACES.items() if mode is DECODE]
        for lengths in itertools.product((0, 5), repeat=len(places)):
            filled = dict(zip(places, lengths, strict=True))
            with self.subTest(**filled):
                world = World(DECODE, **filled)
                before = world.state()
                world.turn(probe(1), probe(2), probe(3))
                generated = 0 if any(lengths) else 1
                self.assertEqual(len(world.dispatched), generated)
                self.assertEqual(len(world.replies()), 3 - generated)
                self.assertEqual(world.state(), before)

    def test_a_stuck_step_answers_nothing_and_the_next_pass_answers(self):
        for place, mode in PLACES.items():
            for loop in LOOPS[mode]:
                with self.subTest(place=place, loop=loop):
                    self.assert_answers_only_when_it_turns(World(mode, **{place: 5}), loop)
        for loop in LOOPS[NULL]:
            with self.subTest(place="running", loop=loop):
                self.assert_answers_only_when_it_turns(World(NULL, running=5), loop)

    def assert_answers_only_when_it_turns(self, world, loop):
        stuck, release = threading.Event(), threading.Event()

        def step(*_, **__):
            stuck.set()
            release.wait()
            raise StepOver

        def turn_twice():
            world.run(loop, step)
            world.run(loop, step)

        turning = threading.Thread(target=turn_twice, daemon=True)
        turning.start()
        self.assertTrue(stuck.wait(timeout=60), "the loop never came to its step")
        world.inbox.append(probe())
        self.assertEqual(world.replies(), [])
        release.set()
        turning.join(timeout=60)
        self.assertEqual(len(world.replies()), 1)
        self.assertEqual(world.dispatched, [])

    def test_requests_that_are_parked_elsewhere_count(self):
        for name, hide in {
            "grammar": lambda made: made.grammar_manager.grammar_queue.append(object()),
            "chunk": lambda made: setattr(made, "chunked_req", SimpleNamespace(rid="r")),
            "last batch": lambda made: setattr(made, "last_batch", batch(1)),
        }.items():
            with self.subTest(name):
                world = World(DECODE)
                hide(world.scheduler)
                world.turn(probe())
                self.assertEqual((len(world.replies()), world.dispatched), (1, []))

    def test_work_of_the_same_pass_is_not_overtaken_by_a_generation(self):
        for first, second in ((request(), probe()), (probe(), request())):
            world = World(DECODE)
            world.turn(first, second)
            self.assertEqual(len(world.replies()), 1)
            self.assertEqual([message.rid for message in world.dispatched], ["a user's request"])

    def test_a_probe_that_arrives_with_a_pause_is_answered(self):
        for change in (PauseGenerationReqInput, ContinueGenerationReqInput):
            world = World(DECODE)
            world.turn(build(change), probe())
            self.assertEqual(len(world.replies()), 1)
            self.assertEqual([type(message) for message in world.dispatched], [change])


class TestSuspendedServer(HealthCheckTest):
    def test_a_paused_server_answers_and_generates_nothing(self):
        for mode in LOOPS:
            world = World(mode)
            world.scheduler._engine_paused = True
            world.turn(probe())
            self.assertEqual((len(world.replies()), world.dispatched), (1, []))

    def test_released_memory_is_not_touched(self):
        world = World(DECODE)
        owner = world.scheduler.weight_updater if HAS_COMPONENTS else world.scheduler
        owner.offload_tags.add("kv_cache")
        world.turn(probe())
        self.assertEqual((len(world.replies()), world.dispatched), (1, []))


class TestServerAtRest(HealthCheckTest):
    def test_it_generates_for_one_probe_and_answers_the_others(self):
        for mode in LOOPS:
            world = World(mode)
            first = probe(1)
            relayed = world.turn(first, *(probe(number) for number in range(2, 21)))
            self.assertEqual(world.dispatched, [first])
            self.assertEqual(relayed, [first])
            self.assertEqual(len(set(world.replies())), 19)

    def test_an_embedding_probe_is_a_probe(self):
        world = World(NULL)
        asked = probe(cls=TokenizedEmbeddingReqInput, max_new_tokens=0)
        world.turn(asked)
        self.assertEqual((world.dispatched, world.replies()), ([asked], []))
        world.scheduler.waiting_queue = parked(1)
        world.turn(probe(2, cls=TokenizedEmbeddingReqInput, max_new_tokens=0))
        self.assertEqual((len(world.dispatched), len(world.replies())), (1, 1))

    @unittest.skipUnless(hasattr(Scheduler, "is_fully_idle"), "0.5.9 holds nothing at rest")
    def test_memory_held_for_a_dead_peer_does_not_delay_the_answer(self):
        world = World(DECODE)
        only_for_probes = lambda _, for_health_check=False: for_health_check  # noqa: E731
        with mock.patch.object(Scheduler, "is_fully_idle", only_for_probes):
            world.turn(probe())
        self.assertEqual((len(world.replies()), len(world.dispatched)), (1, 1))


class TestWhatIsAProbe(HealthCheckTest):
    def test_an_abort_under_a_probes_id_is_an_abort(self):
        for places in ({}, {"prealloc": 5}, {"running": 5}):
            world = World(DECODE, **places)
            world.turn(build(AbortReq, rid=probe().rid))
            self.assertEqual([type(message) for message in world.dispatched], [AbortReq])
            self.assertEqual(world.replies(), [])
            self.assertFalse(world.scheduler.return_health_check_ipcs)
            self.assertFalse(world.scheduler.return_health_check_ct)

    def test_a_request_for_more_than_one_token_is_served_whatever_its_id(self):
        asked = request(rid=f"{health_probe.RID_PREFIX} of mine")
        world = World(DECODE, running=5)
        world.turn(asked)
        self.assertEqual((world.dispatched, world.replies()), ([asked], []))

    def test_probes_withdrawn_while_the_loop_stood_still_are_not_run(self):
        world = World(DECODE)
        old = [probe(1), build(AbortReq, rid=probe(1).rid), probe(2)]
        world.turn(*old)
        self.assertEqual([type(message) for message in world.dispatched], [AbortReq])
        self.assertEqual(len(world.replies()), 2)

    def test_the_prefix_is_upstreams(self):
        constants = importlib.import_module("sglang.srt.constants")
        wanted = getattr(constants, "HEALTH_CHECK_RID_PREFIX", "HEALTH_CHECK")  # 0.5.9: a literal
        self.assertEqual(health_probe.RID_PREFIX, wanted)

    def test_the_echo_goes_back_whatever_the_state(self):
        for places in ({}, {"transfer": 5}):
            world = World(DECODE, **places)
            relayed = world.turn(HealthCheckOutput(rid="HEALTH_CHECK_7", http_worker_ipc="ipc://7"))
            self.assertEqual(world.replies(), [("HEALTH_CHECK_7", "ipc://7")])
            self.assertEqual((world.dispatched, relayed), ([], []))


class TestRanks(HealthCheckTest):
    def test_ranks_of_a_stage_run_the_same_requests_and_one_answers(self):
        for place, mode in ((None, DECODE), *PLACES.items()):
            places = {place: 5} if place else {}
            ranks = [World(mode, socket=socket, **places) for socket in (True, False)]
            messages = [request("r1"), probe(1)] if place == "waiting" else [probe(1), probe(2)]
            for rank in ranks:
                rank.turn(*messages)
            self.assertEqual(ranks[0].dispatched, ranks[1].dispatched)

    def test_a_later_stage_runs_what_the_first_one_relays(self):
        for stage_two in ({}, {"transfer": 5}):  # a request may leave a stage a pass later
            first, second = World(DECODE), World(DECODE, first_stage=False, **stage_two)
            relayed = first.turn(probe(1), probe(2))
            second.turn(*relayed)
            self.assertEqual(len(first.dispatched), 1)
            self.assertEqual(first.dispatched, second.dispatched)
            self.assertEqual(second.replies(), [])

    def test_a_pipeline_loop_does_not_relay_an_answered_probe(self):
        places = {DECODE: "transfer", PREFILL: "inflight", NULL: "running"}
        for mode, place in places.items():
            loop = LOOPS[mode][-1]
            with self.subTest(loop):
                world = World(mode, **{place: 5})
                user = request()
                world.inbox += [probe(), user]
                step = mock.Mock(side_effect=StepOver)
                world.run(loop, step)
                self.assertEqual([message.rid for message in world.relayed], [user.rid])
                self.assertEqual(len(world.replies()), 1)
                if mode is NULL:  # the others relay after votes on their queues
                    self.assertIs(step.call_args.args[0], world.relayed)

    def test_a_data_parallel_rank_answers_for_itself(self):
        busy, idle = World(DECODE, transfer=5), World(DECODE)
        for rank in (busy, idle):
            rank.turn(probe())
        self.assertEqual((len(busy.replies()), len(busy.dispatched)), (1, 0))
        self.assertEqual((len(idle.replies()), len(idle.dispatched)), (0, 1))


class TestRustServer(HealthCheckTest):
    def test_a_rust_frontend_is_answered_through_its_ring(self):
        world = World(DECODE, prealloc=5)
        world.scheduler.rust_server = mock.Mock()
        world.turn(probe())
        self.assertEqual(world.scheduler.rust_server.push_health_ack.call_count, 1)
        self.assertEqual(world.replies(), [])


class Receiver:
    """A decode receiver whose prefill dies after some polls, or never says a word again."""

    kv_mgr = SimpleNamespace(enable_deferred_decode_kv_release=False)
    abort_notified = False

    def __init__(self, fails_at):
        self.fails_at, self.polls = fails_at, 0

    def poll(self):
        self.polls += 1
        return KVPoll.Failed if self.polls >= self.fails_at else KVPoll.Transferring

    def failure_exception(self):
        raise RuntimeError("the prefill instance is gone")

    def clear(self):
        pass


class TestDeadPrefill(HealthCheckTest):
    def test_decode_stays_healthy_while_transfers_fail(self):
        world = World(DECODE)
        queue = world.scheduler.disagg_decode_transfer_queue
        released, streamed, freed = [], [], []
        for number, fails_at in enumerate((1, 2, 2, 4, 10**9)):
            queue.queue.append(self.transfer(number, Receiver(fails_at)))
        self.prepare(queue, released, streamed, freed)
        for turn in range(1, 6):
            before = world.state()
            world.turn(probe(turn))
            self.assertEqual(len(world.replies()), turn)
            self.assertEqual(world.state(), before)
            self.assertEqual(queue.pop_transferred(), [])
        self.assertEqual([entry.req.rid for entry in queue.queue], ["r4"])
        self.assertEqual(released, ["r0", "r1", "r2", "r3"])
        self.assertEqual(sorted(freed), [0, 1, 2, 3])
        self.assertEqual([req.rid for req in streamed], released)
        for req in streamed:
            self.assertEqual(req.finished_reason.status_code, HTTPStatus.INTERNAL_SERVER_ERROR)

    def transfer(self, number, receiver):
        req = SimpleNamespace(
            rid=f"r{number}",
            bootstrap_room=number,
            return_logprob=False,
            finished_reason=None,
            add_latency=lambda *_: None,
            time_stats=mock.MagicMock(),
        )
        return SimpleNamespace(
            req=req,
            kv_receiver=receiver,
            metadata_buffer_index=number,
            hicache_restore_status=None,
            host_staged=False,
        )

    def prepare(self, queue, released, streamed, freed):
        """What `pop_transferred` of this release touches beyond the queue itself."""

        def stream(requests, *_):
            streamed.extend(requests)

        queue.scheduler = SimpleNamespace(
            stream_output=stream,
            output_streamer=SimpleNamespace(stream_output=stream),
            enable_metrics=False,
            enable_decode_hicache=False,
            enable_hisparse=False,
            metrics_reporter=mock.MagicMock(enable_metrics=False),
        )
        queue.tree_cache = queue.gloo_group = None
        queue.tp_rank = 0
        queue.enable_staging = queue.enable_deferred_kv_release = False
        queue.metadata_buffers = mock.MagicMock()
        queue.req_to_metadata_buffer_idx_allocator = SimpleNamespace(free=freed.append)
        queue._record_transfer_failure = queue._abort_failed_transfer = lambda *_: None
        queue._clean_hicache_prefetch_resources = lambda *_: None
        queue._poll_with_metadata_gate = lambda: [e.kv_receiver.poll() for e in queue.queue]

        def release(owner, *_, **__):
            released.append(getattr(owner, "req", owner).rid)

        replaced = {
            "release_kv_cache": release,
            "poll_and_all_reduce": lambda receivers, _: [r.poll() for r in receivers],
            "all_reduce_flags": lambda flags, **_: flags,
        }
        for name, value in replaced.items():
            if hasattr(decode, name):
                patch = mock.patch.object(decode, name, value)
                patch.start()
                self.addCleanup(patch.stop)
        if slots := getattr(decode, "metadata_slots", None):  # where rows have owners
            patch = mock.patch.object(
                slots, "leave_queue", lambda entry, **_: freed.append(entry.metadata_buffer_index)
            )
            patch.start()
            self.addCleanup(patch.stop)
        if hasattr(DecodeTransferQueue, "_release_request"):
            queue._release_request = release


if __name__ == "__main__":
    unittest.main()
