# SPDX-License-Identifier: Apache-2.0
"""Decode is looked at one look at a time and a bounded number of times, whatever it knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from pdlab import occupancy
from pdlab.occupancy import Sample, kv_in_use, sampling

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
LOADS = {
    "loads": [
        {
            "num_running_reqs": 4,
            "queues": {"waiting": 3},
            "disaggregation": {"decode_transfer_queue_reqs": 2, "decode_retracted_queue_reqs": 1},
        }
    ]
}


@asynccontextmanager
async def serving(paths: dict[str, Handler]) -> AsyncIterator[str]:
    """The address of a server with these paths."""
    app = web.Application()
    for path, handler in paths.items():
        app.router.add_get(path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield site.name
    finally:
        await runner.cleanup()


def look(paths: dict[str, Handler], until: int, interval_s: float = 0.001) -> list[Sample]:
    """The samples of a server with these paths, once it had been asked `until` times."""
    asked = 0

    def counted(handler: Handler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            nonlocal asked
            asked += 1
            return await handler(request)

        return handle

    async def run() -> list[Sample]:
        counting = {path: counted(handler) for path, handler in paths.items()}
        async with serving(counting) as url, sampling(url, interval_s) as samples:
            while asked < until:
                await asyncio.sleep(0.001)
        return samples

    return asyncio.run(run())


def answering(content: object) -> Handler:
    async def handle(_: web.Request) -> web.Response:
        return web.json_response(content)

    return handle


def test_rows_are_counted_by_the_server_that_does() -> None:
    slots = {"free": 60, "transferring": 1, "waiting": 3}
    state = answering({"internal_states": [{"metadata_slots": slots}]})
    sample = look({"/server_info": state, "/v1/loads": answering(LOADS)}, 4)[0]
    assert sample.slots == slots
    assert sample.held == 4
    assert sample.requests == {"transfer": 2, "waiting": 3, "running": 4, "retracted": 1}


def test_stock_holds_a_row_for_each_request_in_transfer() -> None:
    state = answering({"internal_states": [{}]})
    sample = look({"/server_info": state, "/v1/loads": answering(LOADS)}, 4)[0]
    assert sample.held == 2


@pytest.mark.parametrize("content", [[], {}, {"loads": []}])
def test_a_server_that_knows_neither_is_no_error(content: object) -> None:
    if content == []:

        async def broken(_: web.Request) -> web.Response:
            return web.Response(text="<html>")

        assert look({"/v1/loads": broken}, 2)[0].held is None
    else:
        assert look({"/v1/loads": answering(content)}, 2)[0].held is None


def test_looks_never_overlap() -> None:
    here, most = 0, 0

    async def slow(_: web.Request) -> web.Response:
        nonlocal here, most
        here += 1
        most = max(most, here)
        await asyncio.sleep(0.01)
        here -= 1
        return web.json_response({})

    look({"/server_info": slow}, 5)
    assert most == 1


def test_a_long_wave_keeps_a_bounded_number_of_looks_from_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(occupancy, "MOST_SAMPLES", 8)
    samples = look({"/server_info": answering({})}, 40, 0.0)
    times = [sample.at_s for sample in samples]
    assert 4 <= len(samples) < 8
    assert times == sorted(times)
    assert times[0] < times[-1] / 4  # the beginning is still there


def in_use(loads: list[dict[str, int]], limit_s: float = 10.0) -> int | None:
    """What is in use of a server that answers these, one a look, and then the last again."""
    left = list(loads)

    async def handle(_: web.Request) -> web.Response:
        return web.json_response({"loads": [left.pop(0) if len(left) > 1 else left[0]]})

    async def run() -> int | None:
        async with serving({"/v1/loads": handle}) as url:
            return await kv_in_use(url, limit_s)

    return asyncio.run(run())


def test_kv_in_use_is_waited_for_until_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occupancy, "INTERVAL_S", 0.001)
    assert in_use([{"num_used_tokens": 32}, {"num_used_tokens": 16}, {"num_used_tokens": 0}]) == 0


def test_kv_that_stays_in_use_is_told_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occupancy, "INTERVAL_S", 0.001)
    assert in_use([{"num_used_tokens": 16}], limit_s=0.01) == 16


def test_a_server_that_does_not_count_its_kv_has_none_to_tell() -> None:
    assert in_use([{"num_running_reqs": 0}]) is None
