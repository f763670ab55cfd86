# SPDX-License-Identifier: Apache-2.0
"""Health probes: several at once, or at a fixed rate whether or not those before were answered."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

PATH = "/health_generate"
# Answered by the process that speaks HTTP, without its scheduler: what HTTP alone costs.
HTTP_ONLY_PATH = "/model_info"
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


async def volley(url: str, count: int, path: str = PATH) -> list[Probe]:
    """The probes that `count` askers send at once."""
    start = time.monotonic()
    async with _session() as session:
        return list(
            await asyncio.gather(*(_probe(session, url + path, start) for _ in range(count)))
        )


@asynccontextmanager
async def probing(
    url: str, interval_s: float = INTERVAL_S, path: str = PATH
) -> AsyncIterator[list[Probe]]:
    """Probe `url` while the body runs; the list is complete once the body is left.

    In a thread of its own: traffic that keeps this one busy must not count as the server's time.
    """
    probes: list[Probe] = []
    over = threading.Event()

    async def clock() -> None:
        start = time.monotonic()
        async with _session() as session:
            tasks = []
            while not over.is_set():
                tasks.append(asyncio.create_task(_probe(session, url + path, start, probes)))
                await asyncio.sleep(interval_s)
            await asyncio.gather(*tasks)

    thread = threading.Thread(target=asyncio.run, args=(clock(),), daemon=True)
    thread.start()
    try:
        yield probes
    finally:
        over.set()
        await asyncio.to_thread(thread.join)


def _session() -> aiohttp.ClientSession:
    limit = aiohttp.ClientTimeout(total=LIMIT_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limit)


async def _probe(
    session: aiohttp.ClientSession, url: str, start: float, probes: list[Probe] | None = None
) -> Probe:
    sent = time.monotonic()
    status = None
    try:
        async with session.get(url) as reply:
            status = reply.status
    except (aiohttp.ClientError, asyncio.TimeoutError):
        pass
    probe = Probe(sent - start, time.monotonic() - sent, status)
    if probes is not None:
        probes.append(probe)
    return probe
