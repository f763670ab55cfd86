# SPDX-License-Identifier: Apache-2.0
"""What the decode server holds while requests pass through it, asked at a bounded rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

INTERVAL_S = 0.25
# A wave that lasts longer keeps this many samples, spread over all of it.
MOST_SAMPLES = 240
LIMIT_S = 10.0
STATE = "/server_info"
LOADS = "/v1/loads?include=core,disagg,queues"


@dataclass(frozen=True)
class Sample:
    """One look: seconds since the first was due, metadata rows by status, requests by place.

    `slots` is empty of a server that does not count its rows. A stock one has a row held for each
    request in transfer, and for nothing else.
    """

    at_s: float
    slots: dict[str, int] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)

    @property
    def held(self) -> int | None:
        """Rows that somebody holds; None where the server said neither."""
        if self.slots:
            return sum(self.slots.values()) - self.slots["free"]
        return self.requests.get("transfer")


@asynccontextmanager
async def sampling(url: str, interval_s: float = INTERVAL_S) -> AsyncIterator[list[Sample]]:
    """Look at `url` while the body runs, one look at a time; the list is complete afterwards."""
    samples: list[Sample] = []
    limit = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(timeout=limit) as session:
        looking = asyncio.create_task(_look(session, url, interval_s, samples))
        try:
            yield samples
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking


async def _look(
    session: aiohttp.ClientSession, url: str, interval_s: float, samples: list[Sample]
) -> None:
    start = time.monotonic()
    due = 0.0
    while True:
        state, loads = await asyncio.gather(_get(session, url + STATE), _get(session, url + LOADS))
        samples.append(Sample(time.monotonic() - start, _slots(state), _requests(loads)))
        if len(samples) == MOST_SAMPLES:
            del samples[1::2]
            interval_s *= 2
        due = max(due + interval_s, time.monotonic() - start)
        await asyncio.sleep(start + due - time.monotonic())


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    """The reply as JSON; nothing where the server does not know the path or is too slow."""
    try:
        async with session.get(url) as reply:
            return await reply.json() if reply.status == 200 else {}
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError):
        return {}


async def kv_in_use(url: str, limit_s: float) -> int | None:
    """KV tokens that are locked or lost, as soon as there are none; None of one that does not say.

    What a server merely keeps for later prompts is not in use.
    """
    limit = time.monotonic() + limit_s
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session:
        while True:
            loads = (await _get(session, url + LOADS)).get("loads", ())
            used = [load["num_used_tokens"] for load in loads if "num_used_tokens" in load]
            if not any(used) or time.monotonic() > limit:
                return sum(used) if used else None
            await asyncio.sleep(INTERVAL_S)


def _slots(state: Any) -> dict[str, int]:
    """Rows by status of the first rank; all ranks hold the same."""
    return next((s.get("metadata_slots", {}) for s in state.get("internal_states", ())), {})


def _requests(loads: Any) -> dict[str, int]:
    """Requests by where they are, as /v1/loads tells it from 0.5.9 on."""
    for load in loads.get("loads", ()):
        queues = load.get("disaggregation", {})
        places = {
            "prealloc": queues.get("decode_prealloc_queue_reqs"),
            "transfer": queues.get("decode_transfer_queue_reqs"),
            "waiting": load.get("queues", {}).get("waiting"),
            "running": load.get("num_running_reqs"),
            "retracted": queues.get("decode_retracted_queue_reqs"),
        }
        return {place: count for place, count in places.items() if count is not None}
    return {}
