# SPDX-License-Identifier: Apache-2.0
"""What ten health probes a second cost a pair under the traffic of `burst`.

    bench/health_probe_servers.py --patched build/0.5.23/python [--rounds N] [--json FILE]

One pair; in every other tenth of a second (windows.py) decode is asked for its health, once or five
times. Each probe costs the same, so that fifty a second show five times as clearly what ten cost.
"""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import dataclass, field
from functools import partial

import aiohttp
import windows

from pdlab.control import schedulers
from pdlab.health import PATH
from pdlab.process import group

ROUNDS = 800
PROMISED = 0.01
"""Most that ten a second may cost of throughput."""
PROBES = {"quiet": 0, "10 a second": 1, "50 a second": 5}
"""Probes in a window."""
SPREAD = 0.8
"""The first part of a window, in which they are sent: what they cost is to fall into it."""


@dataclass
class Prober:
    """Sends probes whenever it is told to, at moments of the window drawn anew."""

    url: str
    session: aiohttp.ClientSession
    sending: set[asyncio.Task[None]] = field(default_factory=set)
    draw: random.Random = field(default_factory=lambda: random.Random(2))

    def send(self, count: int) -> None:
        for _ in range(count):
            task = asyncio.create_task(self._send())
            self.sending.add(task)
            task.add_done_callback(self.sending.discard)

    async def _send(self) -> None:
        wait_s = windows.GUARD_S + self.draw.uniform(0, SPREAD * windows.WINDOW_S)
        await asyncio.sleep(wait_s)
        async with self.session.get(self.url + PATH) as reply:
            reply.raise_for_status()


async def measure(steady: windows.Steady, rounds: int) -> list[windows.Window]:
    """The windows in all settings."""
    decode = steady.pair.decode
    working = schedulers(decode)
    meters = {
        "scheduler": windows.processor_time(working),
        "HTTP": windows.processor_time(list(set(group(decode.process.pid)) - set(working))),
    }
    async with aiohttp.ClientSession() as session:
        prober = Prober(decode.url, session)
        turns = {name: partial(prober.send, count) for name, count in PROBES.items()}
        found = await steady.windows(turns, rounds, meters)
        await asyncio.gather(*prober.sending)
    return found


def main() -> int:
    given = windows.arguments(__doc__ or "", ROUNDS)
    with windows.steady(given.patched.resolve().parent, {}) as steady:
        found = windows.rows(asyncio.run(measure(steady, given.rounds)))
    spent = {
        f"{meter}, ms/s": [f"{1000 * row['spent'][meter]:.1f}" for row in found]
        for meter in found[0]["spent"]
    }
    promised = {name: PROMISED * count for name, count in PROBES.items() if count}
    return int(not windows.report(given, found, spent, promised))


if __name__ == "__main__":
    sys.exit(main())
