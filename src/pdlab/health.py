# SPDX-License-Identifier: Apache-2.0
"""Health probes at a fixed rate, each on time whether or not the one before was answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

PATH = "/health_generate"
INTERVAL_S = 0.1
LIMIT_S = 30.0


@dataclass(frozen=True)
class Probe:
    """One probe: when it was sent (seconds from the first), how long it took, what it got."""

    sent_s: float
    latency_s: float
    status: int | None

    @property
    def ok(self) -> bool:
        return self.status == 200


@asynccontextmanager
async def probing(
    url: str, interval_s: float = INTERVAL_S, path: str = PATH
) -> AsyncIterator[list[Probe]]:
    """Probe `url` while the body runs; the list is complete once the body is left."""
    probes: list[Probe] = []
    limit = aiohttp.ClientTimeout(total=LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        start = time.monotonic()

        async def probe() -> None:
            sent = time.monotonic()
            status = None
            try:
                async with session.get(url + path) as reply:
                    status = reply.status
            except (aiohttp.ClientError, asyncio.TimeoutError):
                pass
            probes.append(Probe(sent - start, time.monotonic() - sent, status))

        async def clock(tasks: list[asyncio.Task[None]]) -> None:
            while True:
                tasks.append(asyncio.create_task(probe()))
                await asyncio.sleep(interval_s)

        tasks: list[asyncio.Task[None]] = []
        ticking = asyncio.create_task(clock(tasks))
        try:
            yield probes
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, *tasks, return_exceptions=True)
