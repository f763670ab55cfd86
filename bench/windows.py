# SPDX-License-Identifier: Apache-2.0
"""Settings of a running pair in turns of a tenth of a second each, under steady traffic.

A machine that others use as well changes its speed by a third from second to second, but seldom
from one tenth to the next: short windows tell a per cent apart where whole bursts do not. Every
other window is in the base setting, and the one between is compared with the two beside it. The
decode scheduler counts its tokens and says when (`pdlab.models.tally`); a window's throughput is
what it counted from pass to pass.

More clients than decode runs at a time keep it full, and it has a processor to itself, as it has
everywhere but in a lab: else what any other process does there would count as its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import frame
import psutil
from pairs import running

from pdlab import trees
from pdlab.control import schedulers
from pdlab.errors import LabError
from pdlab.figures import interval
from pdlab.models import tally
from pdlab.models.board import Board
from pdlab.pair import Pair
from pdlab.process import group
from pdlab.scenarios import burst
from pdlab.traffic import Request, send

TALLY_FILE = "tally"
WINDOW_S, GUARD_S = 0.1, 0.01
"""A window unless `--window` says otherwise, and how long after its turn it begins."""
WARM_S = 5.0
STUCK_S = 60.0
AT_A_TIME = 24
LENGTHS = range(60, 141)
"""New tokens of a request; of equal length they would all end, and begin, together."""

Turn = Callable[[], None]
"""Takes a pair into a setting, from one moment to the next."""
Meter = Callable[[], float]
"""Seconds spent on something so far."""


@dataclass(frozen=True)
class Window:
    """Tokens a second, and seconds spent in a second by meter."""

    setting: str
    throughput: float
    spent: dict[str, float]


@dataclass
class Steady:
    """A pair that clients keep busy, each with one request after the other."""

    pair: Pair
    requests: Sequence[Request]

    def __post_init__(self) -> None:
        self._tally = self.board(TALLY_FILE, tally.WORDS)

    def board(self, name: str, words: int) -> memoryview[int]:
        """The words of a file that the servers share with this process."""
        temporary = self.pair.decode.process.command.environment["TMPDIR"]
        return Board(Path(temporary, name), words).words

    async def windows(
        self,
        settings: Mapping[str, Turn],
        meters: Mapping[str, Meter],
        rounds: int,
        window_s: float,
    ) -> list[Window]:
        """Windows, the first, the last and every other in the first setting.

        Each round has one in each of the others, in an order drawn anew.
        """
        base, *others = settings
        draw = random.Random(1)
        turns = [name for _ in range(rounds) for name in draw.sample(others, len(others))]
        found = []
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            clients = asyncio.gather(*(self._client(session, one) for one in self.requests))
            try:
                await asyncio.sleep(WARM_S)
                for name in (base, *(each for turn in turns for each in (turn, base))):
                    settings[name]()
                    await asyncio.sleep(GUARD_S)
                    found.append(await self._window(name, meters, window_s))
                    if clients.done():
                        clients.result()
            finally:
                clients.cancel()
                await asyncio.gather(clients, return_exceptions=True)
        return found

    async def _client(self, session: aiohttp.ClientSession, request: Request) -> None:
        while True:
            outcome = await send(session, self.pair.url, request)
            if not outcome.ok:
                raise LabError(f"a request failed: {outcome.error}")

    async def _window(self, setting: str, meters: Mapping[str, Meter], window_s: float) -> Window:
        start, (tokens, at) = time.monotonic(), self._count()
        before = {name: meter() for name, meter in meters.items()}
        then = at
        while then == at:  # once, unless the machine is so busy that no pass has ended
            if time.monotonic() > start + STUCK_S:
                raise LabError(f"decode generated nothing in {STUCK_S:g} s")
            await asyncio.sleep(window_s)
            more, then = self._count()
        seconds = time.monotonic() - start
        spent = {name: (meter() - before[name]) / seconds for name, meter in meters.items()}
        return Window(setting, 1e9 * (more - tokens) / (then - at), spent)

    def _count(self) -> tuple[int, int]:
        """Tokens so far, and the time in nanoseconds at which the last were."""
        return self._tally[tally.TOKENS], self._tally[tally.AT_NS]


@contextmanager
def steady(tree: Path, switches: Mapping[str, str]) -> Iterator[Steady]:
    """The pair of a built tree, with `switches` in its environment; what goes wrong ends all."""
    settings = replace(
        burst.SCENARIO.settings,
        prefill_flags=("--sleep-on-idle",),
        decode_flags=("--sleep-on-idle", "--max-running-requests", str(AT_A_TIME)),
    )
    draw = random.Random(1)
    try:
        served = [trees.existing(tree, trees.PATCHED)]
        more = {tally.SWITCH: TALLY_FILE, **switches}
        with running(tree.parent, served, settings, more) as ([pair], requests):
            _give_own_core(schedulers(pair.decode), pair)
            yield Steady(pair, [replace(one, new_tokens=draw.choice(LENGTHS)) for one in requests])
    except LabError as error:
        sys.exit(f"{error}")


def processor_time(pids: Sequence[int]) -> Meter:
    """Processor time of some processes."""
    processes = [psutil.Process(pid) for pid in pids]
    return lambda: sum(sum(process.cpu_times()[:2]) for process in processes)


def _give_own_core(pids: Sequence[int], pair: Pair) -> None:
    """The last processor for `pids` alone; the rest of the pair and this process keep off it."""
    *rest, own = sorted(os.sched_getaffinity(0))
    if not rest:
        sys.exit("two processors are needed: one for the decode scheduler, one for all others")
    for pid in (os.getpid(), *(pid for one in pair.servers for pid in group(one.process.pid))):
        for thread in psutil.Process(pid).threads():
            os.sched_setaffinity(thread.id, {own} if pid in pids else rest)


def rows(found: Sequence[Window]) -> list[dict[str, Any]]:
    """By setting: throughput, its ratio to the mean of the two base windows beside it with a 95 %
    interval, and by meter the seconds spent in a second.

    A base window is compared with the base windows next to it: what this machine can tell apart.
    """
    base, *others = dict.fromkeys(window.setting for window in found)
    made = []
    for name in (base, *others):
        there = [place for place, window in enumerate(found) if window.setting == name]
        away = 2 if name == base else 1
        ratios = [
            2 * found[place].throughput
            / (found[place - away].throughput + found[place + away].throughput)
            for place in there
            if away <= place < len(found) - away
        ]  # fmt: skip
        made.append(
            {
                "setting": name,
                "throughput": statistics.median(found[place].throughput for place in there),
                "ratio": statistics.median(ratios),
                "interval": interval(ratios),
                "spent": {
                    meter: statistics.mean(found[place].spent[meter] for place in there)
                    for meter in found[0].spent
                },
            }
        )
    return made


def table(made: Sequence[Mapping[str, Any]], more: Mapping[str, Sequence[str]]) -> str:
    """The rows for a reader, with `more` columns."""
    columns = {
        "": [row["setting"] for row in made],
        "tok/s": [f"{row['throughput']:,.0f}" for row in made],
        f"of {made[0]['setting']}": [f"{row['ratio']:.4f}" for row in made],
        "95 % interval": ["{:.4f} {:.4f}".format(*row["interval"]) for row in made],
        **more,
    }
    lines = zip(*([head, *cells] for head, cells in columns.items()), strict=True)
    widths = [max(map(len, (head, *cells))) for head, cells in columns.items()]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def arguments(about: str, rounds: int) -> argparse.Namespace:
    """The command line of a file that measures in windows, `rounds` by default."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--patched", type=Path, help="python folder of a built tree", required=True)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"default {rounds}")
    parser.add_argument("--window", type=float, default=WINDOW_S, metavar="SECONDS",
                        help=f"default {WINDOW_S:g}; what is delayed from one window to the next "
                        "counts less in a longer one")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def report(
    given: argparse.Namespace,
    made: Sequence[Mapping[str, Any]],
    more: Mapping[str, Sequence[str]],
    promised: Mapping[str, float],
) -> bool:
    """Print and keep the rows; whether none of them refutes what is promised.

    `promised`: by setting, the most that it may cost of throughput.
    """
    print(table(made, more), end="\n\n")
    frame.write(given.json, made, rounds=given.rounds, window_s=given.window)
    kept = True
    for row in made:
        most = promised.get(row["setting"])
        if most is not None:
            print(verdict(row, most))
            kept &= row["interval"][1] >= 1 - most
    return kept


def verdict(row: Mapping[str, Any], most: float) -> str:
    """Whether the setting of `row` costs at most `most` of the throughput, for a reader."""
    low, high = row["interval"]
    said = "is shown" if low >= 1 - most else "is refuted" if high < 1 - most else "is not resolved"
    return f"{row['setting']}: throughput within {most:.0%} {said} (95 %: {low:.4f} to {high:.4f})"
