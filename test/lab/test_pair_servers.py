# SPDX-License-Identifier: Apache-2.0
"""A patched pair on real servers: EAGLE, the real router, and Mooncake's TCP transport."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from built import BUILD, START_LIMIT_S, TREE, on_servers
from leftovers import MARK, marked

from pdlab import trees
from pdlab.control import load, post, stopped
from pdlab.health import volley
from pdlab.pair import Launcher, Pair, Server
from pdlab.progress import Progress
from pdlab.runner import Runner
from pdlab.settings import Device, Model, Settings
from pdlab.traffic import Outcome, Request, random_requests, send_all

pytestmark = on_servers


@dataclass
class Up:
    """Servers that serve, and what they serve."""

    pair: Pair
    model: Model
    logs: Path
    aggregated: dict[Request, Outcome]

    def send(self, *requests: Request) -> list[Outcome]:
        return asyncio.run(send_all(self.pair.url, requests))


def probe(server: Server, count: int) -> list[int | None]:
    """What so many probes at once are answered with."""
    return [each.status for each in asyncio.run(volley(server.url, count))]


@pytest.fixture(scope="module")
def requests() -> tuple[Request, ...]:
    lengths = (1, 16, 17, 64, 129, 257)
    return random_requests(11, 512, lengths, 48, stream_every=2)


@pytest.fixture(scope="module")
def up(requests: tuple[Request, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A pair on the built tree, once an aggregated server has answered and ended."""
    logs = tmp_path_factory.mktemp("logs")
    mark = os.environ[MARK] = f"servers-{os.getpid()}"
    tree = trees.existing(TREE, trees.PATCHED)
    with Launcher(Device.CPU, START_LIMIT_S, logs) as launcher:
        model = Runner(launcher, Progress(), BUILD / "fixtures").model_of(Settings())
        with launcher.aggregated(tree, Settings(), model) as server:
            answers = asyncio.run(send_all(server.url, requests))
        with launcher.pair(tree, Settings(), model) as pair:
            yield Up(pair, model, logs, dict(zip(requests, answers, strict=True)))
    del os.environ[MARK]
    assert marked(mark) == []


def test_tokens_equal_an_aggregated_server_s(up: Up, requests: tuple[Request, ...]) -> None:
    outcomes = up.send(*requests)
    assert [outcome.error for outcome in outcomes] == [None] * len(requests)
    for request, outcome in zip(requests, outcomes, strict=True):
        assert outcome.tokens == up.aggregated[request].tokens
        assert len(outcome.tokens) == request.new_tokens


def test_drafts_are_accepted_as_on_an_aggregated_server(
    up: Up, requests: tuple[Request, ...]
) -> None:
    def mean(outcomes: list[Outcome]) -> float:
        return sum(outcome.accept_length or 0 for outcome in outcomes) / len(outcomes)

    aggregated = mean([up.aggregated[request] for request in requests])
    # the analytic draft agrees with its target nearly always; garbage gives less than two
    assert aggregated > 3
    assert mean(up.send(*requests)) == pytest.approx(aggregated, rel=0.05)


def test_the_kv_cache_travels_by_mooncake_s_tcp_transport(up: Up) -> None:
    for role in ("prefill", "decode"):
        [log] = up.logs.glob(f"*-{role}.log")
        assert "using TCP transport only" in log.read_text(errors="replace")


def test_the_tree_says_which_patches_it_serves_with(up: Up) -> None:
    for role in ("prefill", "decode"):
        [log] = up.logs.glob(f"*-{role}.log")
        assert "cpu-pd" in log.read_text(errors="replace")


def test_a_prompt_longer_than_the_context_is_refused_with_its_reason(up: Up) -> None:
    long = Request((5,) * (up.model.context + 900), 8)
    [outcome] = up.send(long)
    assert outcome.status == 400
    assert f"longer than the model's context length ({up.model.context} tokens)" in str(
        outcome.error
    )
    [after] = up.send(Request((5, 6, 7), 4))
    assert after.ok


def test_decode_answers_a_health_probe(up: Up) -> None:
    with urllib.request.urlopen(up.pair.decode.url + "/health_generate", timeout=30) as reply:
        assert reply.status == 200


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_half_a_request_is_not_lost_on_a_connection_that_rested_for_five_seconds(
    up: Up, role: str
) -> None:
    """The server stands still while SGLang's own keep-alive would end, and the router sends."""
    burst = random_requests(13, up.model.vocab, [40] * 8, 16)
    pid = getattr(up.pair, role).process.pid
    assert all(outcome.ok for outcome in up.send(*burst))
    time.sleep(4.2)
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(2.0, os.kill, (pid, signal.SIGCONT)).start()
    outcomes = asyncio.run(send_all(up.pair.url, burst, limit_s=20))
    assert [outcome.error for outcome in outcomes] == [None] * len(burst)


def test_a_scheduler_that_stands_still_is_unhealthy_until_it_goes_on(up: Up) -> None:
    with stopped(up.pair.decode):
        assert probe(up.pair.decode, 3) == [503] * 3
    assert probe(up.pair.decode, 3) == [200] * 3


def test_paused_generation_is_healthy(up: Up) -> None:
    for mode in ("in_place", "retract", "abort"):
        asyncio.run(post(up.pair.decode, "/pause_generation", mode=mode))
        assert probe(up.pair.decode, 5) == [200] * 5
        asyncio.run(post(up.pair.decode, "/continue_generation"))


def test_decode_is_healthy_while_requests_wait_for_a_prefill_and_after_its_end(up: Up) -> None:
    """The last test of this file: it ends the prefill server."""

    async def send_and_kill() -> tuple[list[Outcome], list[list[int | None]]]:
        seen = []
        with stopped(up.pair.prefill):
            sending = asyncio.ensure_future(send_all(up.pair.url, burst))
            while (await load(up.pair.decode))["transfer"] < len(burst):
                await asyncio.sleep(0.05)
            seen.append(await asyncio.to_thread(probe, up.pair.decode, 20))
            up.pair.prefill.process.stop()
            seen.append(await asyncio.to_thread(probe, up.pair.decode, 20))
        return await sending, seen

    burst = random_requests(12, up.model.vocab, [40] * 8, 16)
    outcomes, seen = asyncio.run(send_and_kill())
    assert seen == [[200] * 20] * 2
    assert all(outcome.error for outcome in outcomes)
    assert probe(up.pair.decode, 20) == [200] * 20
