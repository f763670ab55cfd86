# SPDX-License-Identifier: Apache-2.0
"""Stock beside patched: one process holds each tree and they take turns on the same machine.

A benchmark is a file with a `Bench` in it. Its `side` is made in either process and answers turns;
the parent alternates between the two and reports medians, spread and the median of the ratios of
two turns that follow each other: what slows the machine down for a while slows both.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Case = Mapping[str, Any]
PACKAGES = ("sglang-pd-series", "sglang", "sglang-router", "torch")
"""What a result names the version of."""


class Side(Protocol):
    """One tree, set up for one case."""

    @property
    def patched(self) -> bool:
        """Whether the tree has the patch that is measured."""

    def turn(self) -> dict[str, float]:
        """Measure once: figures by name, the same names on both sides."""


@dataclass(frozen=True)
class Bench:
    """What one file measures. `ceilings`: most that patched may be of stock, by figure.

    `cases`: keyword arguments of `side`, one set each. `units`: by figure, "us" where it says none.
    `work`: the argument that says how much there is to do, from the least to the most.
    `pairs`: processes of each tree. Two of the same tree differ by a percent or two, for as long as
    they live, by where their memory happens to lie; several even that out.
    """

    about: str
    side: Callable[..., Side]
    cases: Sequence[Case]
    ceilings: Callable[[Case, str], float | None] = lambda case, figure: None
    units: Mapping[str, str] = field(default_factory=dict)
    turns: int = 30
    pairs: int = 1
    work: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def microseconds(
    call: Callable[[], object], seconds: float = 0.03, calls_per_look: int = 1
) -> float:
    """Microseconds of this thread for one call, averaged over as many as fit into `seconds`.

    A call that takes no longer than the look at the clock is made more often between two looks.
    """
    calls, start = 0, time.thread_time()
    while (spent := time.thread_time() - start) < seconds:
        for _ in range(calls_per_look):
            call()
        calls += calls_per_look
    return 1e6 * spent / calls


def least_microseconds(
    call: Callable[[], object], looks: int = 10, calls_per_look: int = 10
) -> float:
    """Microseconds for one call in the best of some short looks: nobody else had the core then."""
    spent = []
    for _ in range(looks):
        start = time.perf_counter_ns()
        for _ in range(calls_per_look):
            call()
        spent.append(time.perf_counter_ns() - start)
    return min(spent) / 1000 / calls_per_look


def environment(tree: Path | None) -> dict[str, str]:
    """The environment of a process that imports SGLang from `tree`, else the installed one."""
    from pdlab import standin

    path = [tree and str(tree.resolve()), standin.python_path()]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(entry) for entry in path if entry),
        "OMP_NUM_THREADS": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }


class Worker:
    """A process that holds one tree and runs the benchmark's file with `--serve`."""

    def __init__(self, name: str, file: str, tree: Path | None, more: Mapping[str, str]) -> None:
        self.name, self.file = name, file
        self.process = subprocess.Popen(
            [sys.executable, file, "--serve"],
            env={**environment(tree), **more},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, case: Case | None = None) -> dict[str, Any]:
        """Set up a case, or measure once."""
        assert self.process.stdin and self.process.stdout
        print(json.dumps(case), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(
                f"{self.name}: the process ended; `echo null | PYTHONPATH=TREE/python "
                f"{self.file} --serve` says why"
            )
        return dict(json.loads(answer))

    def close(self) -> None:
        """End the process: it holds nothing that would have to be put away."""
        self.process.kill()
        self.process.wait()


def serve(bench: Bench) -> None:
    """Answer the parent, one line each; whatever else is printed goes to stderr."""
    side: Side | None = None
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        case = json.loads(line)
        if case is not None:
            side = bench.side(**case)
            answer: dict[str, Any] = {"patched": side.patched}
        else:
            assert side is not None, "a case comes first"
            answer = side.turn()
        print(json.dumps(answer), file=answers, flush=True)


def measure(
    bench: Bench, pairs: Sequence[tuple[Worker, Worker]], turns: int
) -> list[dict[str, Any]]:
    """A row for each case and figure, over turns in which the trees alternate."""
    rows = []
    for case in bench.cases:
        for stock, patched in pairs:
            for worker in (stock, patched):
                if worker.ask(case)["patched"] != (worker is patched):
                    sys.exit(f"{worker.name}: this tree is {'not ' * (worker is patched)}patched")
                worker.ask()
        seen = []
        for turn in range(turns):
            stock, patched = pairs[turn % len(pairs)]
            order = (stock, patched) if turn // len(pairs) % 2 else (patched, stock)
            said = {worker: worker.ask() for worker in order}
            seen.append((said[stock], said[patched]))
        for figure in seen[0][0]:
            before, after = ([turn[figure] for turn in side] for side in zip(*seen, strict=True))
            unit, ceiling = bench.units.get(figure, "us"), bench.ceilings(case, figure)
            one = row(case, figure, unit, before, after, ceiling)
            rows.append(one | of_neighbours(before, after))
    return rows


def of_neighbours(stock: Sequence[float], patched: Sequence[float]) -> dict[str, Any]:
    """The median ratio of turns that follow each other, and its quartiles."""
    ratios = [after / before for before, after in zip(stock, patched, strict=True) if before]
    if len(ratios) < 2:
        return {}
    return {
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios)[::2],
    }


def row(
    case: Case,
    figure: str,
    unit: str,
    stock: Sequence[float],
    patched: Sequence[float],
    ceiling: float | None = None,
) -> dict[str, Any]:
    """One figure of one case: medians of two or more measurements of either tree."""
    before, after = statistics.median(stock), statistics.median(patched)
    return {
        **case,
        "figure": figure,
        "unit": unit,
        "stock": before,
        "stock_quartiles": statistics.quantiles(stock)[::2],
        "patched": after,
        "patched_quartiles": statistics.quantiles(patched)[::2],
        "ratio": after / before if before else None,
        "ceiling": ceiling,
    }


def growth(work: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """By figure and case: what the most work costs, as a multiple of the least."""
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for one in rows:
        rest = [f"{key} {one[key]}" for key in one if key not in _COLUMNS | {work}]
        found.setdefault((*rest, one["figure"]), []).append(one)
    lines = []
    for name, same in found.items():
        least, most = same[0], same[-1]
        if least["stock"] and least["patched"] and least is not most:
            times = [f"{tree} {most[tree] / least[tree]:.1f} x" for tree in ("stock", "patched")]
            lines.append(
                f"{', '.join(name)}: {work} {least[work]} to {most[work]} "
                f"({most[work] / least[work]:g} x) costs {', '.join(times)}"
            )
    return lines


def table(keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows for a reader: median, and half the distance of the quartiles as its spread."""
    head = [*keys, "figure", "stock", "patched", "ratio"]
    lines = [head]
    for row in rows:
        values = [_shown(row, tree) for tree in ("stock", "patched")]
        lines.append([*(str(row[key]) for key in keys), row["figure"], *values, _ratio(row)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _shown(row: Mapping[str, Any], tree: str) -> str:
    low, high = row[f"{tree}_quartiles"]
    return f"{_digits(row[tree])} ±{_digits((high - low) / 2)} {row['unit']}".rstrip()


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _ratio(row: Mapping[str, Any]) -> str:
    if row["ratio"] is None:
        return "-"
    low, high = row.get("ratio_quartiles") or (0.0, 0.0)
    return f"{row['ratio']:.3f}" + (f" ±{(high - low) / 2:.3f}" if high > low else "")


def missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows that are above their ceiling."""
    found = []
    for row in rows:
        if row["ceiling"] is None or (row["ratio"] or 0.0) <= row["ceiling"]:
            continue
        case = {key: row[key] for key in row if key not in _COLUMNS}
        where = ", ".join(f"{key} {value}" for key, value in case.items())
        promised = f"{row['ratio']:.3f} of stock, at most {row['ceiling']} promised"
        found.append(f"{row['figure']}, {where}: {promised}")
    return found


_COLUMNS = {
    "figure", "unit", "stock", "stock_quartiles", "patched", "patched_quartiles", "ratio",
    "ratio_quartiles", "ceiling",
}  # fmt: skip


def machine() -> dict[str, Any]:
    """What the figures were measured on, without a name of the machine."""
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{package: installed.get(package) for package in PACKAGES},
    }


def _processor() -> str:
    try:
        facts = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in facts.splitlines() if "model name" in line]
    return names[0] if names else platform.processor()


def write(file: Path | None, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Keep what was measured, and on what; nothing of it names the machine or a path."""
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**machine(), **more, "rows": rows}, indent=1) + "\n")


def run(bench: Bench, file: str) -> int:
    """The command of a benchmark's file; 1 when a figure is above its ceiling."""
    parser = argparse.ArgumentParser(description=bench.about)
    parser.add_argument(
        "--patched", type=Path, metavar="PATH", help="`python` folder of a built tree"
    )
    parser.add_argument("--stock", type=Path, metavar="PATH", help="of a stock one; else installed")
    parser.add_argument("--turns", type=int, default=bench.turns, metavar="N",
                        help=f"of each tree, 2 or more; default {bench.turns}")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(bench)
        return 0
    if not given.patched:
        parser.error("--patched says which tree to measure beside stock")
    if given.turns < 2:
        parser.error("one turn has no spread: --turns 2 or more")
    pairs: list[tuple[Worker, Worker]] = []
    try:
        for _ in range(bench.pairs):
            stock = Worker("stock", file, given.stock, bench.environment)
            pairs.append((stock, Worker("patched", file, given.patched, bench.environment)))
        rows = measure(bench, pairs, given.turns)
    finally:
        for worker in (worker for pair in pairs for worker in pair):
            worker.close()
    print(table(list(bench.cases[0]), rows))
    grown = growth(bench.work, rows) if bench.work else []
    if grown:
        print("", *grown, sep="\n")
    write(given.json, rows, growth=grown)
    for miss in missed(rows):
        print(miss, file=sys.stderr)
    return int(bool(missed(rows)))
