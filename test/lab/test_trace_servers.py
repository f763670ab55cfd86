# SPDX-License-Identifier: Apache-2.0
"""A pair under KV pressure writes a trace that opens; nobody in it owns another's row."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from built import BUILD, START_LIMIT_S, TREE, on_servers

from pdlab import report, trace, trees
from pdlab.pair import Launcher
from pdlab.progress import Progress
from pdlab.runner import Runner
from pdlab.settings import Device, Settings
from pdlab.traffic import Outcome, random_requests, send_all

REQUESTS, PROMPT, NEW_TOKENS = 16, 40, 80
# Eight of the requests fill it.
SETTINGS = Settings(decode_kv_tokens=600, decode_reserved_tokens=8)
# At prefill, where "queue" is a step only of those that wait longer than a pass.
PREFILL = ["bootstrap", "prefill", "transfer", "finish"]
# What may follow each step at decode.
FOLLOWS = {
    None: {"bootstrap"},
    "bootstrap": {"prealloc", "transfer"},
    "prealloc": {"transfer"},
    "transfer": {"commit"},
    "commit": {"wait"},
    "wait": {"prebuilt"},
    "prebuilt": {"first decode", "retract"},  # the batch may be too large at once
    "first decode": {"decode", "retract", "finish"},
    "decode": {"retract", "finish"},
    "retract": {"resume"},
    "resume": {"prebuilt"},
}
pytestmark = on_servers
Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Outcome], Events]:
    """What the client saw of a pair under pressure, and the events of its trace file."""
    directory = tmp_path_factory.mktemp("trace")
    collector = trace.Collector(directory / "servers")
    tree = trees.existing(TREE, trees.PATCHED)
    more = collector.environment()
    with Launcher(Device.CPU, START_LIMIT_S, directory, more=more) as launcher:
        model = Runner(launcher, Progress(), BUILD / "fixtures").model_of(SETTINGS)
        with launcher.pair(tree, SETTINGS, model) as pair:
            requests = random_requests(21, model.vocab, [PROMPT] * REQUESTS, NEW_TOKENS)
            outcomes = asyncio.run(send_all(pair.url, requests))
            collector.collect(pair, "patched")
    file = directory / "trace.json"
    report.write(file, collector.content(["pdlab"]), indent=None)
    return outcomes, json.loads(file.read_text())["traceEvents"]


def slices(events: Events, role: str) -> dict[str, list[tuple[str, float, float, Any]]]:
    """The steps of each request of a role's server: name, begin, end and what it owned."""
    pids = {e["pid"] for e in events if e["name" if "name" in e else "ph"] == "process_name"
            and e["args"]["name"].startswith(role)}  # fmt: skip
    found: dict[str, list[tuple[str, float, float, Any]]] = defaultdict(list)
    lanes: dict[tuple[int, int], Events] = defaultdict(list)
    for event in events:
        lane = lanes[event["pid"], event["tid"]]
        if event["pid"] not in pids:
            continue
        if event["ph"] == "B":
            lane.append(event)
        elif event["ph"] == "E":
            begin = lane.pop()
            if lane:
                step = (begin["name"], begin["ts"], event["ts"], begin["args"])
                found[lane[0]["name"]].append(step)
            else:
                found[begin["name"]].append(("finish", event["ts"], event["ts"], event["args"]))
    return {rid: steps for rid, steps in found.items() if not rid.startswith("HEALTH")}


def test_it_is_a_trace_that_opens(traced: tuple[list[Outcome], Events]) -> None:
    _, events = traced
    depth: dict[tuple[int, int], int] = defaultdict(int)
    last = 0.0
    for event in events:
        assert event["ph"] in ("M", "B", "E", "s", "f")
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            continue
        assert event["ts"] >= last
        last = event["ts"]
        lane = event["pid"], event["tid"]
        assert event["ph"] == "E" or event["name"]
        depth[lane] += {"B": 1, "E": -1}.get(event["ph"], 0)
        assert 0 <= depth[lane] <= 2
    assert set(depth.values()) == {0}
    assert len({event["pid"] for event in events}) == 2
    assert len(events) <= 2 * (3 + 4 * trace.TRANSITIONS)


def test_every_request_goes_its_way_on_both_ends(traced: tuple[list[Outcome], Events]) -> None:
    outcomes, events = traced
    assert all(outcome.ok for outcome in outcomes)
    prefill, decode = slices(events, "prefill"), slices(events, "decode")
    assert len(prefill) == len(decode) == REQUESTS
    for steps in prefill.values():
        names = [name for name, *_ in steps]
        assert [name for name in names if name != "queue"] == PREFILL
    retracted = 0
    for steps in decode.values():
        names = [name for name, *_ in steps]
        before = None
        for name in names:
            assert name in FOLLOWS[before], names
            before = name
        assert before == "finish"
        assert steps[-1][3]["tokens"] >= NEW_TOKENS  # the last draft may reach beyond
        retracted += names.count("retract")
    assert retracted == sum(outcome.retractions for outcome in outcomes) > 0


def test_an_arrow_goes_from_each_last_chunk_to_its_commit(
    traced: tuple[list[Outcome], Events],
) -> None:
    _, events = traced
    ends = {ph: {e["id"]: e["ts"] for e in events if e["ph"] == ph} for ph in "sf"}
    assert len(ends["s"]) == REQUESTS
    assert ends["s"].keys() == ends["f"].keys()
    assert all(ends["s"][room] <= ends["f"][room] for room in ends["s"])


def owned(events: Events, what: str) -> Iterator[tuple[float, float, str, str]]:
    """When a request owned a row or pages at decode: begin, end, which, and the request."""
    for rid, steps in slices(events, "decode").items():
        for _, begin, end, facts in steps:
            if what in facts and end > begin:
                yield begin, end, str(facts[what]), rid


@pytest.mark.parametrize("what", ["slot", "request_row"])
def test_no_two_requests_own_the_same_at_once(
    traced: tuple[list[Outcome], Events], what: str
) -> None:
    holdings = sorted(owned(traced[1], what))
    assert len({which for _, _, which, _ in holdings}) > 1
    until: dict[str, tuple[float, str]] = {}
    for begin, end, which, rid in holdings:
        before, holder = until.get(which, (0.0, rid))
        assert holder == rid or before <= begin
        until[which] = end, rid


def test_pages_are_told_as_long_as_they_are_owned(traced: tuple[list[Outcome], Events]) -> None:
    for steps in slices(traced[1], "decode").values():
        for name, _, _, facts in steps:
            has_memory = name not in ("bootstrap", "prealloc", "retract", "finish")
            assert bool(facts.get("pages")) == has_memory, name
            assert bool(facts.get("page_numbers")) == has_memory, name
