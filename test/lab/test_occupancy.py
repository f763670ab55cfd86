# SPDX-License-Identifier: Apache-2.0
"""Decode is looked at one look at a time and a bounded number of times, whatever it knows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from pdlab import occupancy
from pdlab.occupancy import Sample, sampling

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
        app = web.Application()
        for path, handler in paths.items():
            app.router.add_get(path, counted(handler))
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with sampling(site.name, interval_s) as samples:
                while asked < until:
                    await asyncio.sleep(0.001)
            return samples
        finally:
            await runner.cleanup()

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
