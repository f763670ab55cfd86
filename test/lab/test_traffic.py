# SPDX-License-Identifier: Apache-2.0
"""Every reply, right, wrong or broken off, becomes one outcome that tells what happened."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pdlab.health import probing, volley
from pdlab.traffic import Cancel, Outcome, Request, random_requests, send_all

META = {"spec_accept_length": 3.5, "num_retractions": 2, "cached_tokens": 96}
LENGTH = {"finish_reason": {"type": "length"}}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def ask(handler: Handler, *requests: Request, limit_s: float = 5, **more: Any) -> list[Outcome]:
    """Send requests to a server whose /generate is `handler`."""

    async def run() -> list[Outcome]:
        app = web.Application()
        app.router.add_post("/generate", handler)
        async with TestServer(app) as server:
            return await send_all(str(server.make_url("")).rstrip("/"), requests, limit_s=limit_s,
                                  **more)  # fmt: skip

    return asyncio.run(run())


async def right(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    tokens = asked["input_ids"][: asked["sampling_params"]["max_new_tokens"]]
    last = {"output_ids": tokens, "meta_info": {**META, **LENGTH}}
    if not asked["stream"]:
        return web.json_response(last)
    reply = web.StreamResponse()
    await reply.prepare(request)
    first = {"output_ids": tokens[:1], "meta_info": {"finish_reason": None}}
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in (first, last))
    for part in (text[:7], text[7:40], text[40:], "data: [DONE]\n\n"):  # cut where it hurts
        await reply.write(part.encode())
        await asyncio.sleep(0.01)
    return reply


@pytest.mark.parametrize("stream", [False, True])
def test_an_outcome_carries_tokens_and_what_the_server_says_of_them(stream: bool) -> None:
    [outcome] = ask(right, Request((7, 8, 9, 10), 3, stream))
    assert outcome.ok
    assert outcome.tokens == (7, 8, 9)
    assert (outcome.accept_length, outcome.retractions, outcome.cached_tokens) == (3.5, 2, 96)
    assert outcome.status == 200
    assert (outcome.first_token_s is not None) == stream
    assert 0 < (outcome.first_token_s or 1e-9) <= outcome.latency_s


def test_outcomes_come_in_the_order_of_their_requests() -> None:
    async def late_first(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        await asyncio.sleep(0.05 / asked["input_ids"][0])
        return await right(request)

    requests = [Request((number,), 1) for number in range(1, 9)]
    assert [outcome.tokens[0] for outcome in ask(late_first, *requests)] == list(range(1, 9))


def test_no_more_requests_are_under_way_than_allowed() -> None:
    under_way, most = 0, 0

    async def counting(request: web.Request) -> web.StreamResponse:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return await right(request)

    assert len(ask(counting, *[Request((5,), 1)] * 12, concurrency=3)) == 12
    assert most == 3


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "longer than the context"}},
        {"error": {"code": "decode_bad_request", "message": "longer than the context"}},
        {"error": "longer than the context"},
    ],
)
def test_the_message_of_a_refusal_is_passed_on(body: dict[str, Any]) -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=400)

    [outcome] = ask(refuse, Request((5,), 1))
    assert outcome.status == 400
    assert outcome.error == "400: longer than the context"


def test_a_reply_that_is_not_json_is_an_error() -> None:
    async def text(_: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>")

    assert not ask(text, Request((5,), 1))[0].ok


def test_an_error_event_in_a_stream_is_an_error() -> None:
    async def fail(request: web.Request) -> web.StreamResponse:
        return web.Response(text='data: {"error": {"message": "out of memory"}}\n\n')

    [outcome] = ask(fail, Request((5,), 1, stream=True))
    assert "out of memory" in (outcome.error or "")


def test_an_abort_is_an_error_and_its_tokens_are_kept() -> None:
    async def abort(_: web.Request) -> web.StreamResponse:
        meta = {"finish_reason": {"type": "abort", "message": "no memory left"}}
        return web.json_response({"output_ids": [4], "meta_info": meta})

    [outcome] = ask(abort, Request((5,), 1))
    assert outcome.error == "aborted: no memory left"
    assert outcome.tokens == (4,)


def test_a_stream_that_breaks_off_is_an_error() -> None:
    async def half(_: web.Request) -> web.StreamResponse:
        event = {"output_ids": [4], "meta_info": {"finish_reason": None}}
        return web.Response(text=f"data: {json.dumps(event)}\n\n")

    [outcome] = ask(half, Request((5,), 9, stream=True))
    assert "ended before" in (outcome.error or "")


def test_no_reply_in_time_is_an_error() -> None:
    async def never(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(5)
        raise AssertionError

    [outcome] = ask(never, Request((5,), 1), limit_s=0.1)
    assert outcome.error == "no complete reply in 0.1 s"


def test_nobody_listening_is_an_error() -> None:
    [outcome] = asyncio.run(send_all("http://127.0.0.1:9", [Request((5,), 1)]))
    assert not outcome.ok
    assert outcome.status is None


def test_random_requests_are_the_same_every_time_and_share_their_prefix() -> None:
    made = random_requests(1, 512, [30, 40, 50], 8, shared=20, stream_every=2)
    assert made == random_requests(1, 512, [30, 40, 50], 8, shared=20, stream_every=2)
    assert made != random_requests(2, 512, [30, 40, 50], 8, shared=20, stream_every=2)
    assert [len(request.prompt) for request in made] == [30, 40, 50]
    assert len({request.prompt[:20] for request in made}) == 1
    assert len({request.prompt[20:30] for request in made}) == 3
    assert [request.stream for request in made] == [False, True, False]
    assert all(3 <= word < 512 for request in made for word in request.prompt)


def test_probes_keep_their_rate_while_earlier_ones_wait() -> None:
    release = asyncio.Event()

    async def run() -> None:
        async def slow(_: web.Request) -> web.StreamResponse:
            await release.wait()
            return web.Response()

        app = web.Application()
        app.router.add_get("/health_generate", slow)
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            async with probing(url, interval_s=0.01) as probes:
                await asyncio.sleep(0.2)
                assert probes == []
                release.set()
            assert len(probes) > 3
            assert all(probe.ok for probe in probes)

    asyncio.run(run())


def test_probes_of_a_volley_are_there_at_the_same_time() -> None:
    async def run() -> None:
        there, all_there = [], asyncio.Event()

        async def meet(request: web.Request) -> web.StreamResponse:
            there.append(request)
            if len(there) == 5:
                all_there.set()
            await all_there.wait()
            return web.Response()

        app = web.Application()
        app.router.add_get("/health_generate", meet)
        async with TestServer(app) as server:
            probes = await volley(str(server.make_url("")).rstrip("/"), 5)
        assert [probe.status for probe in probes] == [200] * 5

    asyncio.run(run())


def test_a_refused_probe_is_not_ok() -> None:
    async def run() -> None:
        app = web.Application()
        async with TestServer(app) as server:
            async with probing(str(server.make_url("")).rstrip("/"), 0.01) as probes:
                await asyncio.sleep(0.05)
            assert probes
            assert {probe.status for probe in probes} == {404}
            assert not any(probe.ok for probe in probes)

    asyncio.run(run())


def test_a_client_that_gives_up_closes_its_connection() -> None:
    gone = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        try:
            while True:
                await reply.write(b"\n")
                await asyncio.sleep(0.01)
        finally:
            gone.set()

    async def run() -> list[Outcome]:
        app = web.Application()
        app.router.add_post("/generate", endless)
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            outcomes = await send_all(url, [Request((1,), 1, stream=True, cancel=Cancel(0.05))])
            await asyncio.wait_for(gone.wait(), 5)
            return outcomes

    [outcome] = asyncio.run(run())
    assert outcome.cancelled
    assert not outcome.ok


def test_a_client_that_gives_up_by_call_names_its_request_to_every_server() -> None:
    asked: list[str] = []
    called: list[str] = []
    stop = asyncio.Event()

    async def until_aborted(request: web.Request) -> web.StreamResponse:
        asked.append((await request.json())["rid"])
        await stop.wait()
        meta = {"finish_reason": {"type": "abort", "message": "by call"}}
        return web.json_response({"output_ids": [], "meta_info": meta})

    async def abort(request: web.Request) -> web.StreamResponse:
        called.append((await request.json())["rid"])
        if len(called) == 2:
            stop.set()
        return web.Response()

    async def run() -> list[Outcome]:
        app = web.Application()
        app.router.add_post("/generate", until_aborted)
        app.router.add_post("/abort_request", abort)
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            request = Request((1,), 1, cancel=Cancel(0.02, by_call=True))
            return await send_all(url, [request], limit_s=5, servers=[url, url])

    [outcome] = asyncio.run(run())
    assert outcome.cancelled
    assert outcome.error == "aborted: by call"
    assert called == asked * 2


def test_a_request_that_is_answered_first_was_not_cancelled() -> None:
    [outcome] = ask(right, Request((7, 8), 2, cancel=Cancel(5.0)))
    assert outcome.ok
    assert not outcome.cancelled
