# SPDX-License-Identifier: Apache-2.0
"""What ten health probes a second cost a pair under the traffic of `burst`.

    bench/health_probe_servers.py --patched build/0.5.23/python [--rounds N] [--window SECONDS]

One pair; in every other window (windows.py) decode is asked for its health. Each probe costs the
same, so that fifty a second show five times as clearly what ten cost.
"""

from __future__ import annotations

import argparse
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
PROMISED = 0.001
"""Most that one probe a second may cost of throughput."""
RATES = {"quiet": 0, "10 a second": 10, "50 a second": 50}
"""Probes a second."""
SPREAD = 0.8
"""The first part of a window, in which they are sent: what they cost is to fall into it."""


@dataclass
class Prober:
    """Sends probes whenever it is told to, at moments of the window drawn anew."""

    url: str
    session: aiohttp.ClientSession
    window_s: float
    sending: set[asyncio.Task[None]] = field(default_factory=set)
    draw: random.Random = field(default_factory=lambda: random.Random(2))

    def send(self, rate: int) -> None:
        for _ in range(round(rate * self.window_s)):
            task = asyncio.create_task(self._send())
            self.sending.add(task)
            task.add_done_callback(self.sending.discard)

    async def _send(self) -> None:
        into_s = self.draw.uniform(0, SPREAD * self.window_s)
        await asyncio.sleep(windows.GUARD_S + into_s)
        async with self.session.get(self.url + PATH) as reply:
            reply.raise_for_status()


async def measure(steady: windows.Steady, given: argparse.Namespace) -> list[windows.Window]:
    """The windows in all settings."""
    decode = steady.pair.decode
    working = schedulers(decode)
    meters = {
        "scheduler": windows.processor_time(working),
        "HTTP": windows.processor_time(list(set(group(decode.process.pid)) - set(working))),
    }
    async with aiohttp.ClientSession() as session:
        prober = Prober(decode.url, session, given.window)
        turns = {name: partial(prober.send, rate) for name, rate in RATES.items()}
        found = await steady.windows(turns, meters, given.rounds, given.window)
        await asyncio.gather(*prober.sending)
    return found


def main() -> int:
    given = windows.arguments(__doc__ or "", ROUNDS)
    with windows.steady(given.patched.resolve().parent, {}) as steady:
        found = windows.rows(asyncio.run(measure(steady, given)))
    spent = {
        f"{meter}, ms/s": [f"{1000 * row['spent'][meter]:.1f}" for row in found]
        for meter in found[0]["spent"]
    }
    promised = {name: PROMISED * rate for name, rate in RATES.items() if rate}
    return int(not windows.report(given, found, spent, promised))


if __name__ == "__main__":
    sys.exit(main())
