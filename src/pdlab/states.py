# SPDX-License-Identifier: Apache-2.0
"""States that servers are put into while they are asked for their health: a script for each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from pdlab.control import get, load, pools, post, stopped
from pdlab.errors import LabError
from pdlab.health import Probe, probing, volley
from pdlab.pair import Pair, Server
from pdlab.scenarios.model import Seen
from pdlab.traffic import Outcome

Send = Callable[[], Awaitable[list[Outcome]]]

RATE_S = 0.04
HOLD_S = 4.0  # longer than an unanswered probe takes to fail
SHORT_HOLD_S = 1.0
LOOK_S = 0.05
STEADY_LOOKS = 8
STATE_LIMIT_S = 30.0
AT_ONCE = 20
VOLLEYS = 5
MANY = 500
STOPPED_PROBES = 3
UPDATES = 3
AFTER_DEATH_S = 10.0
PAUSED_WITH_REQUESTS_S = 0.3  # after they were sent, so that some of them run


async def at_once(pair: Pair, send: Send) -> Seen:
    """Volleys of probes that arrive together."""
    probes = [probe for _ in range(VOLLEYS) for probe in await volley(pair.decode.url, AT_ONCE)]
    return Seen(await send(), probes)


async def waiting_for_prefill(pair: Pair, send: Send) -> Seen:
    """Prefill stands still, so that a burst waits on decode and nothing of it runs.

    What does not fit the KV pool waits in prealloc, the rest in transfer. A probe that was not
    answered must not wait there as well.
    """
    with stopped(pair.prefill):
        sending = asyncio.ensure_future(send())
        before = await _steady(pair.decode)
        async with probing(pair.decode.url, RATE_S) as probes:
            await asyncio.sleep(HOLD_S)
        after = await load(pair.decode)
    outcomes = await sending
    counts = {name: float(before[name]) for name in ("prealloc", "transfer", "running")}
    counts["left by probes"] = float(_queued(after) - _queued(before))
    return Seen(outcomes, probes, counts)


async def retracting(pair: Pair, send: Send) -> Seen:
    """More requests than the KV pool of decode holds, some retracted at any time."""
    return await _throughout(pair.decode, send, "retracted")


async def chunking(pair: Pair, send: Send) -> Seen:
    """Long prompts on prefill, a chunk in each pass."""
    return await _throughout(pair.prefill, send, "inflight")


async def paused(pair: Pair, send: Send) -> Seen:
    """Generation paused: with requests in it, then in the modes that take those out."""
    probes: list[Probe] = []

    async def pause(mode: str, hold_s: float) -> None:
        await post(pair.decode, "/pause_generation", mode=mode)
        async with probing(pair.decode.url, RATE_S) as asked:
            await asyncio.sleep(hold_s)
        await post(pair.decode, "/continue_generation")
        probes.extend(asked)

    sending = asyncio.ensure_future(send())
    await asyncio.sleep(PAUSED_WITH_REQUESTS_S)
    await pause("in_place", HOLD_S)
    outcomes = await sending
    await pause("retract", SHORT_HOLD_S)
    await pause("abort", SHORT_HOLD_S)
    return Seen(outcomes, probes)


async def weights_updated(pair: Pair, send: Send) -> Seen:
    """The same weights loaded again, each time in one long step of the loop."""
    path = (await get(pair.decode, "/model_info"))["model_path"]
    seconds = []
    async with probing(pair.decode.url, RATE_S) as probes:
        for _ in range(UPDATES):
            await asyncio.sleep(SHORT_HOLD_S)
            start = time.monotonic()
            await post(pair.decode, "/update_weights_from_disk", model_path=path)
            seconds.append(time.monotonic() - start)
        await asyncio.sleep(SHORT_HOLD_S)
    return Seen(await send(), probes, {"longest update, s": max(seconds)})


async def standing_still(pair: Pair, send: Send) -> Seen:
    """The scheduler of decode is stopped and continued: probes fail, then are answered."""
    with stopped(pair.decode):
        failed = await volley(pair.decode.url, STOPPED_PROBES)
    back = await volley(pair.decode.url, 1)
    counts = {
        "stopped, not 503": float(sum(probe.status != 503 for probe in failed)),
        "stopped, s to 503": max(probe.latency_s for probe in failed),
        "continued, not 200": float(sum(not probe.ok for probe in back)),
        "continued, s to 200": back[0].latency_s,
    }
    return Seen(await send(), (), counts)


async def many(pair: Pair, send: Send) -> Seen:
    """Hundreds of probes, half at rest and half in a burst, and whether they left anything."""
    before = await pools(pair.decode)

    async def half() -> list[Probe]:
        rounds = MANY // 2 // AT_ONCE + 1
        return [p for _ in range(rounds) for p in await volley(pair.decode.url, AT_ONCE)]

    probes = await half()
    sending = asyncio.ensure_future(send())
    probes += await half()
    outcomes = await sending
    limit = time.monotonic() + STATE_LIMIT_S
    while (after := await pools(pair.decode)) != before and time.monotonic() < limit:
        await asyncio.sleep(LOOK_S)
    changed = sum(after[name] != before[name] for name in before)
    return Seen(outcomes, probes, {"probes sent": len(probes), "pools changed": changed})


async def losing_prefill(pair: Pair, send: Send) -> Seen:
    """Prefill is killed while decode waits for its KV."""
    sending = asyncio.ensure_future(send())
    limit = time.monotonic() + STATE_LIMIT_S
    while not (waiting := (await load(pair.decode))["transfer"]):
        if time.monotonic() > limit:
            raise LabError("decode never waited for KV, so prefill was not killed")
    pair.prefill.process.stop()
    async with probing(pair.decode.url, RATE_S) as probes:
        await asyncio.sleep(AFTER_DEATH_S)
    return Seen(await sending, probes, {"transfers in flight": waiting})


async def _throughout(server: Server, send: Send, queue: str) -> Seen:
    """Probes from the first request to the last reply, and the most that `queue` held."""
    most = 0
    async with probing(server.url, RATE_S) as probes:
        sending = asyncio.ensure_future(send())
        while not (await asyncio.wait([sending], timeout=LOOK_S))[0]:
            most = max(most, (await load(server))[queue])
    return Seen(sending.result(), probes, {f"most {queue}": most})


async def _steady(server: Server) -> dict[str, int]:
    """The load of a server once requests are queued and no more of them come."""
    limit = time.monotonic() + STATE_LIMIT_S
    last: dict[str, int] = {}
    looks = 0
    while looks < STEADY_LOOKS:
        if time.monotonic() > limit:
            raise LabError(f"{server.process.name} does not come to rest: {last}")
        await asyncio.sleep(LOOK_S)
        now = await load(server)
        looks = looks + 1 if _queued(now) and _queued(now) == _queued(last or now) else 0
        last = now
    return last


def _queued(load: dict[str, int]) -> int:
    return load["prealloc"] + load["transfer"]
