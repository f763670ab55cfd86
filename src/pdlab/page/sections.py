# SPDX-License-Identifier: Apache-2.0
"""The four questions of the page, each answered by a plot and by the same numbers in a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pdlab.page import plots
from pdlab.page.facts import LABELS, Spread, percentile, scenarios, spread, text
from pdlab.trees import PATCHED, STOCK

MARKS = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))


@dataclass(frozen=True)
class Section:
    """A plot with what stands around it; `plot` is Plotly's JSON, empty when nothing was measured.

    `says` is the plot in words, for those who do not see it.
    """

    id: str
    title: str
    lead: str
    absent: str
    plot: str = ""
    says: str = ""
    height: int = 0
    caption: str = ""
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()


def all_of(content: Any) -> list[Section]:
    """The sections in the order of the page."""
    return [accept_length(content), throughput(content), health(content), occupancy(content)]


def accept_lengths(content: Any) -> dict[str, dict[str, Spread | None]]:
    """Tokens accepted in one verification, by kind of request and by tree.

    A request was retracted, or else began with a prefix that decode's radix cache held, or else
    went through undisturbed.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for name, by_label in scenarios(content):
        for label, scenario in by_label.items():
            cache = scenario["settings"]["decode_radix"]
            for request in _requests(scenario):
                if request["accept_length"] is not None:
                    kind = f"{name}, {_kind(request, cache)}"
                    lists = found.setdefault(kind, {label: [] for label in LABELS})
                    lists[label].append(request["accept_length"])
    return {
        kind: {label: spread(values) for label, values in lists.items()}
        for kind, lists in sorted(found.items(), key=lambda item: _place(content, item[0]))
    }


def accept_length(content: Any) -> Section:
    """How well drafts were accepted."""
    kinds = accept_lengths(content)
    most = max(
        each["settings"]["steps"] + 1 for _, by in scenarios(content) for each in by.values()
    )
    base = Section(
        "accept-length",
        "Accept length by kind of request",
        "Tokens that one verification accepts, the bonus token included: means over requests, with "
        f"a line from the 10th to the 90th percentile. Further right is better; {most} is the most "
        "that the draft can give.",
        "No request of this run was drafted.",
    )
    if not kinds:
        return base
    return _with(
        base,
        plots.ranges(kinds, most),
        _sentence((kind, {k: _mean(v) for k, v in by.items()}) for kind, by in kinds.items()),
        "Accept length by kind of request: requests, mean, 10th and 90th percentile",
        ("kind of request", *(f"{label}, {of}" for label in LABELS for of in _SPREAD)),
        [(kind, *_cells(by[STOCK]), *_cells(by[PATCHED])) for kind, by in kinds.items()],
    )


def throughputs(content: Any) -> dict[str, dict[str, float]]:
    """Generated tokens per second by scenario and tree."""
    return {
        each["scenario"]: {label: each[label] for label in LABELS}
        for each in content["comparison"]
        if each["unit"] == "tok/s" and each["stock"] is not None and each["patched"] is not None
    }


def throughput(content: Any) -> Section:
    """Tokens per second."""
    found = throughputs(content)
    base = Section(
        "throughput",
        "Throughput",
        "Generated tokens per second of a whole scenario. Longer is better.",
        "No scenario of this run measures throughput.",
    )
    if not found:
        return base
    shown = {
        name: {label: text(value, "tok/s") for label, value in by.items()}
        for name, by in found.items()
    }
    return _with(
        base,
        plots.bars(found),
        _sentence(shown.items()),
        "Throughput by scenario",
        ("scenario", *LABELS),
        [(name, *by.values()) for name, by in shown.items()],
    )


def probe_latencies(content: Any) -> dict[str, dict[str, list[float]]]:
    """Seconds that answered health probes took, sorted, by wave and tree."""
    found: dict[str, dict[str, list[float]]] = {}
    for _, by_label in scenarios(content):
        for label, scenario in by_label.items():
            for wave in _waves(scenario):
                if times := [p["latency_s"] for p in wave["probes"] if p["status"] == 200]:
                    lists = found.setdefault(wave["name"], {each: [] for each in LABELS})
                    lists[label] = sorted([*lists[label], *times])
    return {name: lists for name, lists in found.items() if all(lists.values())}


def health(content: Any) -> Section:
    """How long a health probe waits."""
    found = probe_latencies(content)
    base = Section(
        "health",
        "Health probes",
        "Share of answered probes of the decode server that took no longer than so many seconds, "
        "on a logarithmic axis. Further left is better.",
        "No scenario of this run probes the health of a server; the one named health does.",
    )
    if not found:
        return base
    median = {
        wave: {label: text(percentile(times, 0.5), "s") for label, times in by.items()}
        for wave, by in found.items()
    }
    return _with(
        base,
        plots.distributions(found),
        _sentence((f"median, {wave}", by) for wave, by in median.items()),
        "Seconds until a health probe was answered",
        ("wave", "tree", "probes", *(mark for mark, _ in MARKS)),
        [
            (wave, label, str(len(by[label])), *_marks(by[label]))
            for wave, by in found.items()
            for label in LABELS
        ],
    )


def held_rows(content: Any) -> dict[str, dict[str, list[tuple[float, int]]]]:
    """Metadata rows held and when, in seconds of a scenario's first round, by scenario and tree."""
    found: dict[str, dict[str, list[tuple[float, int]]]] = {}
    for name, by_label in scenarios(content):
        lines = {}
        for label, scenario in by_label.items():
            begin, points = 0.0, []
            for wave in scenario["rounds"][0]:
                points += [
                    (begin + sample["at_s"], sample["held"])
                    for sample in wave["samples"]
                    if sample["held"] is not None
                ]
                begin += wave["seconds"]
            lines[label] = points
        if all(lines.values()):
            found[name] = lines
    return found


def occupancy(content: Any) -> Section:
    """What decode held over time."""
    found = held_rows(content)
    base = Section(
        "occupancy",
        "Metadata rows held over time",
        "Rows of the decode server's metadata buffers that belong to a request, looked at four "
        "times a second. Stock gives a row back when its transfer is committed and does not count "
        "rows: there it is the requests in transfer. Patched, a request keeps its row until its "
        "first decode result.",
        "The decode server was not looked at in this run.",
    )
    if not found:
        return base
    rows = []
    for name, by in found.items():
        for label in LABELS:
            held = [count for _, count in by[label]]
            mean = sum(held) / len(held)
            rows.append((name, label, str(len(held)), f"{mean:.1f}", str(max(held)), str(held[-1])))
    return _with(
        base,
        plots.steps(found),
        _sentence(
            (f"most held, {name}", {label: str(max(n for _, n in by[label])) for label in LABELS})
            for name, by in found.items()
        ),
        "Metadata rows held, by scenario and tree",
        ("scenario", "tree", "looks", "mean", "most", "last"),
        rows,
    )


_SPREAD = ("requests", "mean", "p10", "p90")


def _with(
    base: Section,
    plot: plots.Plot,
    says: str,
    caption: str,
    columns: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
) -> Section:
    return Section(
        base.id, base.title, base.lead, base.absent, plot.json, says, plot.height, caption, columns,
        rows,
    )  # fmt: skip


def _kind(request: Any, cache: bool) -> str:
    if request["retractions"]:
        return "retracted"
    return "cached prefix" if cache and request["cached_tokens"] else "undisturbed"


def _place(content: Any, kind: str) -> tuple[int, str]:
    """Scenarios as they ran; in each, the undisturbed requests last."""
    names = [name for name, _ in scenarios(content)]
    scenario, _, what = kind.partition(", ")
    return names.index(scenario), what


def _waves(scenario: Any) -> Iterable[Any]:
    return (wave for waves in scenario["rounds"] for wave in waves)


def _requests(scenario: Any) -> Iterable[Any]:
    return (request for wave in _waves(scenario) for request in wave["requests"])


def _mean(values: Spread | None) -> str:
    return f"{values.mean:.2f}" if values else "none"


def _cells(values: Spread | None) -> tuple[str, ...]:
    if values is None:
        return "0", "-", "-", "-"
    return str(values.count), f"{values.mean:.2f}", f"{values.low:.2f}", f"{values.high:.2f}"


def _marks(seconds: list[float]) -> list[str]:
    return [text(percentile(seconds, share), "s") for _, share in MARKS]


def _sentence(facts: Iterable[tuple[str, dict[str, str]]]) -> str:
    """`name: stock a, patched b` of each fact."""
    return "; ".join(f"{name}: stock {by[STOCK]}, patched {by[PATCHED]}" for name, by in facts)
