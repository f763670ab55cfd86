# SPDX-License-Identifier: Apache-2.0
"""What digests cost a pair that serves the traffic of `burst`: off, 1 % and all of the rows.

    bench/handoff_digest_servers.py --patched build/0.5.23/python [--rounds N] [--json FILE]

One pair, whose digests are turned while it is at rest: each round sends the same burst once in each
setting, in an order drawn anew. Shown are throughput and the processor time of both schedulers,
which sleep while they have nothing to do, as ratios within a round; "off again" shows what this
machine can tell apart. What no ratio resolves is counted: the share of each scheduler's processor
time that is spent in the digests themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import frame
import psutil

from pdlab import trees
from pdlab.control import schedulers
from pdlab.figures import interval
from pdlab.models import digest_switch
from pdlab.models.digest_switch import CHECKING_NS, PER_CENT, SIGNING_NS, Board
from pdlab.pair import Launcher, Pair
from pdlab.progress import Progress
from pdlab.runner import Runner
from pdlab.scenarios import burst
from pdlab.settings import Device
from pdlab.traffic import Request, send_all

ROUNDS = 40
WARM_BURSTS = 3
START_LIMIT_S = 300.0
SWITCH_FILE = "digest-switch"
SETTINGS = {"off": 0, "off again": 0, "1 %": 1, "100 %": 100}
"""Per cent of the rows by setting; the first is what the others are compared with."""
THROUGHPUT = "throughput, tok/s"
ENDS = {"prefill": SIGNING_NS, "decode": CHECKING_NS}
PROMISED, SAMPLED = 0.01, "1 %"
"""What the sampled setting may cost: of throughput, and of either scheduler's processor time."""


@dataclass
class Served:
    """A pair with digests that can be turned, and the burst that it is sent."""

    pair: Pair
    requests: Sequence[Request]

    def __post_init__(self) -> None:
        servers = {"prefill": self.pair.prefill, "decode": self.pair.decode}
        self._processes = {
            end: [psutil.Process(pid) for pid in schedulers(server)]
            for end, server in servers.items()
        }
        temporary = self.pair.decode.process.command.environment["TMPDIR"]
        self._board = Board(Path(temporary, SWITCH_FILE))

    def burst(self, per_cent: int) -> dict[str, float]:
        """Tokens per second, and by end milliseconds of processor time a request and the share of
        it that went into digests."""
        self._board.words[PER_CENT] = per_cent
        before, start = self._spent(), time.monotonic()
        outcomes = asyncio.run(send_all(self.pair.url, self.requests))
        seconds, after = time.monotonic() - start, self._spent()
        failed = [outcome.error for outcome in outcomes if not outcome.ok]
        if failed:
            sys.exit(f"{len(failed)} of {len(outcomes)} requests failed: {failed[0]}")
        seen = {THROUGHPUT: sum(len(outcome.tokens) for outcome in outcomes) / seconds}
        for end in ENDS:
            whole, digests = (now - then for now, then in zip(after[end], before[end], strict=True))
            seen[_time(end)] = 1e3 * whole / len(outcomes)
            seen[_share(end)] = digests / whole
        return seen

    def _spent(self) -> dict[str, tuple[float, float]]:
        """Seconds of processor time of each scheduler so far: all, and in digests."""
        return {
            end: (
                sum(sum(process.cpu_times()[:2]) for process in processes),
                self._board.words[ENDS[end]] / 1e9,
            )
            for end, processes in self._processes.items()
        }


def _time(end: str) -> str:
    return f"{end}, ms a request"


def _share(end: str) -> str:
    return f"{end}, share in digests"


def measure(tree: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """What each setting gave in each round."""
    os.environ["SGLANG_HANDOFF_DIGEST"] = "count"
    os.environ[digest_switch.SWITCH] = SWITCH_FILE
    settings = replace(
        burst.SCENARIO.settings,
        prefill_flags=("--sleep-on-idle",),
        decode_flags=("--sleep-on-idle",),
    )
    draw = random.Random(1)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    with (
        tempfile.TemporaryDirectory(prefix="pdlab-logs-") as logs,
        Launcher(Device.CPU, START_LIMIT_S, Path(logs)) as launcher,
    ):
        model = Runner(launcher, Progress(), tree.parent / "fixtures").model_of(settings)
        [wave] = burst.SCENARIO.waves(model.vocab)
        with launcher.pair(trees.existing(tree, trees.PATCHED), settings, model) as pair:
            served = Served(pair, wave.requests)
            for _ in range(WARM_BURSTS):
                served.burst(0)
            for _ in range(rounds):
                for name in draw.sample(list(SETTINGS), len(SETTINGS)):
                    found[name].append(served.burst(SETTINGS[name]))
    return found


def rows(found: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """A row for each setting and figure: its median, and its ratio to "off" with an interval."""
    [(base_name, base), *others] = found.items()
    made = [_row(base_name, figure, base, None) for figure in base[0] if "share" not in figure]
    for name, turns in others:
        for figure in turns[0]:
            made.append(_row(name, figure, turns, None if "share" in figure else base))
    return made


def _row(
    name: str,
    figure: str,
    turns: Sequence[dict[str, float]],
    base: Sequence[dict[str, float]] | None,
) -> dict[str, Any]:
    row = {
        "digests": name,
        "figure": figure,
        "median": statistics.median(turn[figure] for turn in turns),
        "ratio": None,
        "interval": None,
    }
    if base is not None:
        ratios = [turn[figure] / other[figure] for turn, other in zip(turns, base, strict=True)]
        row |= {"ratio": statistics.median(ratios), "interval": interval(ratios)}
    return row


def table(found: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'digests':11}{'figure':26}{'median':>10}{'of off':>9}{'95 % interval':>18}"]
    for row in found:
        share = "share" in row["figure"]
        value = f"{100 * row['median']:.4f} %" if share else f"{row['median']:,.2f}"
        line = f"{row['digests']:11}{row['figure']:26}{value:>10}"
        if row["interval"]:
            low, high = row["interval"]
            line += f"{row['ratio']:>9.4f}{low:>10.4f} {high:.4f}"
        lines.append(line)
    return "\n".join(lines)


def missed(found: Sequence[dict[str, Any]]) -> list[str]:
    """What costs more than is promised: counted, or as a ratio beyond what chance explains."""
    misses = []
    for row in found:
        if row["digests"] != SAMPLED:
            continue
        low, high = row["interval"] or (None, None)
        if row["figure"] == THROUGHPUT:
            above = high < 1 - PROMISED
        else:
            above = row["median"] > PROMISED if low is None else low > 1 + PROMISED
        if above:
            misses.append(f"{SAMPLED} of the rows: {row['figure']} costs more than {PROMISED:.0%}")
    return misses


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--patched", type=Path, help="python folder of a built tree", required=True)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    turns = measure(given.patched.resolve().parent, given.rounds)
    found = rows(turns)
    print(table(found))
    frame.write(given.json, found, rounds=given.rounds, turns=turns)
    for miss in missed(found):
        print(miss, file=sys.stderr)
    return 1 if missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
