# SPDX-License-Identifier: Apache-2.0
"""Throughput of a burst, a stock and a patched pair in turns.

    bench/burst_servers.py --patched build/0.5.23/python [--rounds N] [--json FILE]

Both pairs are up all the time and sleep while the other one works, so that two bursts that are
compared follow each other within a second. Whatever the machine does for longer than that meets
both: bursts of pairs that are started one after the other differ by more than half.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import frame
import windows
from pairs import running

from pdlab import trees
from pdlab.errors import LabError
from pdlab.figures import interval
from pdlab.pair import Pair
from pdlab.scenarios import burst
from pdlab.settings import Device
from pdlab.traffic import Outcome, Request, send_all

ROUNDS, WARM_ROUNDS = 120, 3
REST_S = 0.2
"""Between two bursts, so that what one pair still clears away is not the other one's time."""
LIMIT_S = 20.0
"""Longest for a request of a burst, which takes a second."""
PROMISED = 0.05
"""Most that the series may cost of a burst's throughput."""
SHOWN = 5
"""Failures that an error message names."""
ASLEEP = ("--sleep-on-idle",)


@dataclass(frozen=True)
class Burst:
    """What became of requests that were sent at once."""

    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def failed(self) -> int:
        return sum(not outcome.ok for outcome in self.outcomes)

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        return tuple(outcome.tokens for outcome in self.outcomes)

    @property
    def throughput(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def latencies(self) -> list[float]:
        return sorted(outcome.latency_s for outcome in self.outcomes)


def one(pair: Pair, requests: Sequence[Request]) -> Burst:
    """All requests at once."""
    time.sleep(REST_S)
    begin = time.monotonic()
    outcomes = asyncio.run(send_all(pair.url, requests, limit_s=LIMIT_S))
    return Burst(tuple(outcomes), time.monotonic() - begin)


def turns(pairs: Sequence[Pair], requests: Sequence[Request], rounds: int) -> list[list[Burst]]:
    """By pair a burst a round; who begins alternates. LabError when tokens differ."""
    found: list[list[Burst]] = [[] for _ in pairs]
    for turn in range(-WARM_ROUNDS, rounds):
        order = range(len(pairs)) if turn % 2 else reversed(range(len(pairs)))
        bursts = {place: one(pairs[place], requests) for place in order}
        if len({each.tokens for each in bursts.values() if not each.failed}) > 1:
            raise LabError("stock and patched gave different tokens for the same requests")
        if turn >= 0:
            for place, each in bursts.items():
                found[place].append(each)
    return found


@contextmanager
def both(tree: Path) -> Iterator[tuple[list[Pair], Sequence[Request]]]:
    """A stock pair and that of a built tree, both up, and what to ask them."""
    patched = trees.existing(tree, trees.PATCHED)
    stock = trees.stock(patched.release, tree.parent, Device.CPU)
    settings = replace(burst.SCENARIO.settings, prefill_flags=ASLEEP, decode_flags=ASLEEP)
    with running(tree.parent, [stock, patched], settings) as up:
        yield up


def rows(stock: Sequence[Burst], patched: Sequence[Burst]) -> list[dict[str, Any]]:
    """Throughput and latency: medians, and the ratio of bursts that followed each other.

    A round in which a request failed counts as that only: how long it took is its limit.
    """
    whole = [two for two in zip(stock, patched, strict=True) if not any(one.failed for one in two)]
    if len(whole) < 2:
        told = "; ".join(said(one) for one in failures(stock, patched)[:SHOWN])
        raise LabError(f"requests failed in all of {len(stock)} rounds but {len(whole)}: {told}")
    figures = {
        "throughput": ("tok/s", lambda each: each.throughput),
        "latency p50": ("s", lambda each: each.latencies[len(each.latencies) // 2]),
        "latency max": ("s", lambda each: each.latencies[-1]),
    }
    case = {"requests": len(stock[0].outcomes)}
    made = []
    for name, (unit, of) in figures.items():
        sides = tuple([of(two[side]) for two in whole] for side in (0, 1))
        ratios = [after / before for before, after in zip(*sides, strict=True)]
        row = frame.row(case, name, unit, *sides) | frame.of_neighbours(*sides)
        made.append(row | {"interval": interval(ratios)})
    failed = [[float(one.failed) for one in side] for side in (stock, patched)]
    return [*made, frame.row(case, "requests failed", "", *failed) | _sums(*failed)]


def failures(stock: Sequence[Burst], patched: Sequence[Burst]) -> list[dict[str, Any]]:
    """How many requests of which burst failed with which error, in the order of the rounds."""
    return [
        {"round": turn, "tree": tree, "error": error, "requests": requests}
        for turn, two in enumerate(zip(stock, patched, strict=True), 1)
        for tree, each in zip((trees.STOCK, trees.PATCHED), two, strict=True)
        for error, requests in Counter(one.error for one in each.outcomes if not one.ok).items()
    ]


def said(failure: Mapping[str, Any]) -> str:
    """One of them for a reader."""
    return "round {round}, {tree}: {requests} x {error}".format(**failure)


def _sums(stock: Sequence[float], patched: Sequence[float]) -> dict[str, Any]:
    """All of them, where other rows have the median: most bursts have none."""
    return {"stock": sum(stock), "patched": sum(patched), "ratio": None}


def main() -> int:
    """1 when a patched pair fails a request, tokens differ, or it costs more than is promised."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--patched", type=Path, required=True, metavar="PATH",
                        help="`python` folder of a built tree")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N",
                        help=f"2 or more; default {ROUNDS}")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("one round has no spread: --rounds 2 or more")
    try:
        with both(given.patched.resolve().parent) as (pairs, requests):
            found = turns(pairs, requests, given.rounds)
        made, failed = rows(*found), failures(*found)
    except LabError as error:
        sys.exit(f"{error}")
    print(frame.table(("requests",), made), end="\n\n")
    for each in failed:
        print(said(each))
    frame.write(given.json, made, rounds=given.rounds, failures=failed)
    print(windows.verdict({"setting": "patched", "interval": made[0]["interval"]}, PROMISED))
    lost = any(each["tree"] == trees.PATCHED for each in failed)
    return int(lost or made[0]["interval"][1] < 1 - PROMISED)


if __name__ == "__main__":
    sys.exit(main())
