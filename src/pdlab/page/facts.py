# SPDX-License-Identifier: Apache-2.0
"""What the page says in words and numbers, read off the JSON of a comparison."""

from __future__ import annotations

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pdlab.figures import Better, Figure, Verdict, show
from pdlab.trees import PATCHED, STOCK

LABELS = (STOCK, PATCHED)
TILES = 4
TILES_OF_A_SCENARIO = 2
# A word is not enough for those who cannot see the colour, nor a sign for those who can.
SIGNS = {
    Verdict.BETTER: "▲",
    Verdict.SAME: "=",
    Verdict.WORSE: "▼",
    Verdict.NOT_YET: "◇",
    Verdict.NONE: "",
}


@dataclass(frozen=True)
class Row:
    """One figure of both trees, as text; `kind` is the verdict as the style sheet names it."""

    name: str
    stock: str
    patched: str
    ratio: str
    verdict: str
    sign: str
    kind: str


@dataclass(frozen=True)
class Group:
    """The rows of one scenario."""

    name: str
    about: str
    rows: list[Row]


@dataclass(frozen=True)
class Tile:
    """A figure worth seeing first: `gain` times `way` (higher or lower)."""

    name: str
    scenario: str
    stock: str
    patched: str
    gain: str
    way: str


@dataclass(frozen=True)
class Headline:
    """The verdict: `kind` is good, mixed or bad; `lines` are sentences."""

    title: str
    kind: str
    verdict: str
    lines: list[str]
    tiles: list[Tile]


@dataclass(frozen=True)
class Spread:
    """Many values as few: how many, their mean, and the 10th and 90th percentile."""

    count: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Origin:
    """What made the page."""

    created: str
    command: str
    machine: list[tuple[str, str]]
    versions: list[tuple[str, str]]
    trees: list[Tree]


@dataclass(frozen=True)
class Tree:
    """One tree that was measured, with the command lines of its servers by settings."""

    label: str
    release: str
    note: str
    patches: list[str]
    startup: str
    commands: list[tuple[str, str]]


def scenarios(content: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each scenario's name and what it gave on each tree, by the tree's label."""
    runs = {run["label"]: run["scenarios"] for run in content["runs"]}
    for number, scenario in enumerate(runs[STOCK]):
        yield scenario["name"], {label: runs[label][number] for label in LABELS}


def percentile(values: Sequence[float], share: float) -> float:
    """The value below or at which that share of all lies, by nearest rank."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spread(values: Sequence[float]) -> Spread | None:
    """The values as few numbers; None of none."""
    if not values:
        return None
    low, high = percentile(values, 0.1), percentile(values, 0.9)
    return Spread(len(values), statistics.fmean(values), low, high)


def text(value: float | None, unit: str) -> str:
    """A value as the table on the terminal shows it."""
    return show(Figure("", value, unit))


def groups(content: Any) -> list[Group]:
    """The comparison by scenario."""
    made: dict[str, Group] = {}
    about = {run["name"]: run["about"] for run in content["runs"][0]["scenarios"]}
    for each in content["comparison"]:
        name = each["scenario"]
        group = made.setdefault(name, Group(name, about[name], []))
        verdict = Verdict(each["verdict"])
        group.rows.append(
            Row(
                each["figure"],
                text(each["stock"], each["unit"]),
                text(each["patched"], each["unit"]),
                "" if each["ratio"] is None else f"{each['ratio']:.2f}",
                verdict.value,
                SIGNS[verdict],
                verdict.name.lower(),
            )
        )
    return list(made.values())


def headline(content: Any) -> Headline:
    """The verdict in one sentence, what has to hold, and the figures that moved most."""
    counts = Counter(Verdict(each["verdict"]) for each in content["comparison"])
    release = content["runs"][-1]["release"]
    broken = [
        f"{scenario['name']}: {figure['name']} is {text(figure['value'], figure['unit'])} on the "
        f"patched tree and must be {text(figure['must'], figure['unit'])}."
        for scenario in content["runs"][-1]["scenarios"]
        for figure in scenario["figures"]
        if figure["must"] is not None and figure["value"] != figure["must"]
    ]
    verdict = (
        f"Patched is better than stock in {_of(counts[Verdict.BETTER])}, the same in "
        f"{counts[Verdict.SAME]}, worse in {counts[Verdict.WORSE] or 'none'}"
    )
    if counts[Verdict.NOT_YET]:
        verdict += f", and not better yet in {counts[Verdict.NOT_YET]} that it is meant to improve"
    held = "On the patched tree every answer has the tokens of an aggregated server."
    fine = not counts[Verdict.WORSE] and not counts[Verdict.NOT_YET]
    return Headline(
        f"SGLang {release}: stock beside patched",
        "bad" if broken else "good" if fine else "mixed",
        f"{verdict}.",
        broken or [held],
        tiles(content),
    )


def tiles(content: Any) -> list[Tile]:
    """Figures that the series is meant to improve, those that moved most first."""
    aims = {
        (scenario["name"], figure["name"])
        for scenario in content["runs"][-1]["scenarios"]
        for figure in scenario["figures"]
        if figure["aim"]
    }
    better = [
        each
        for each in content["comparison"]
        if (each["scenario"], each["figure"]) in aims
        and each["verdict"] == Verdict.BETTER.value
        and each["ratio"]
    ]
    made: list[Tile] = []
    seen: Counter[str] = Counter()
    for each in sorted(better, key=lambda each: -abs(math.log(each["ratio"]))):
        first = f"{each['scenario']} {each['figure'].split()[0]}"  # p50 and p99 of one thing: once
        full = seen[each["scenario"]] == TILES_OF_A_SCENARIO or len(made) == TILES
        if full or seen[first] or " / " in each["figure"]:
            continue
        seen.update((each["scenario"], first))
        made.append(_tile(each))
    return made


def origin(content: Any) -> Origin:
    """Commands, versions and the machine."""
    machine = content["machine"]
    return Origin(
        content["created"],
        shlex.join(content["command"]),
        [
            ("system", machine["system"]),
            ("processor", machine["processor"]),
            ("cores", str(machine["cores"])),
        ],
        sorted(content["versions"].items()),
        [_tree(run) for run in content["runs"]],
    )


def _of(count: int) -> str:
    return f"{count} figure{'' if count == 1 else 's'}" if count else "no figure"


def _tile(each: Any) -> Tile:
    lower = each["ratio"] < 1
    gain = 1 / each["ratio"] if lower else each["ratio"]
    return Tile(
        each["figure"],
        each["scenario"],
        text(each["stock"], each["unit"]),
        text(each["patched"], each["unit"]),
        f"{gain:.0f}" if gain >= 10 else f"{gain:.1f}",
        Better.LOWER.value if lower else Better.HIGHER.value,
    )


def _tree(run: Any) -> Tree:
    return Tree(
        run["label"],
        run["release"],
        run["note"],
        run["patches"],
        ", ".join(f"{seconds:.1f} s" for seconds in run["startup_s"]),
        [
            (settings, "\n\n".join(shlex.join(words) for words in commands))
            for settings, commands in run["commands"].items()
        ],
    )
