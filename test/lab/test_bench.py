# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks make of what they measured; what they measure needs no test but a machine."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdlab.errors import LabError
from pdlab.traffic import Outcome

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of `bench/` are importable, as they are for each other."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    for name in ("burst_servers", "frame", "pairs", "servers", "soak", "windows"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_ratio_above_its_ceiling_is_missed_by_name(bench: None) -> None:
    import frame

    case = {"queue": "transfer", "queued": 64}
    slow = frame.row(case, "nothing new", "us", [10.0, 12.0], [10.0, 13.0], ceiling=1.0)
    fast = frame.row(case, "one set", "us", [10.0, 12.0], [1.0, 2.0], ceiling=1.0)
    free = frame.row(case, "copied", "B", [10.0, 12.0], [99.0, 99.0])
    (missed,) = frame.missed([slow, fast, free])
    assert missed.startswith("nothing new, queue transfer, queued 64: 1.045 of stock")


def test_growth_compares_the_most_work_with_the_least_case_by_case(bench: None) -> None:
    import frame

    rows = [
        frame.row({"queue": queue, "queued": queued}, "pass", "us", 2 * [stock], 2 * [2.0])
        for queue, each in (("a", 1.0), ("b", 2.0))
        for queued, stock in ((64, 4 * each), (256, 5.0), (4096, 200.0))
    ]
    assert frame.growth("queued", rows) == [
        "queue a, pass: queued 64 to 4096 (64 x) costs stock 50.0 x, patched 1.0 x",
        "queue b, pass: queued 64 to 4096 (64 x) costs stock 25.0 x, patched 1.0 x",
    ]
    assert frame.growth("queued", rows[:1]) == []


def test_a_table_has_a_line_for_each_row_with_its_spread(bench: None) -> None:
    import frame

    rows = [frame.row({"page": 1}, "match", "us", [1.0, 3.0], [1200.0, 1200.0])]
    head, line = frame.table(["page"], rows).splitlines()
    assert head.split() == ["page", "figure", "stock", "patched", "ratio"]
    assert line.split() == ["1", "match", "2", "±1.5", "us", "1,200", "±0", "us", "600.000"]


def test_what_is_kept_names_versions_and_neither_machine_nor_path(
    bench: None, tmp_path: Path
) -> None:
    import frame

    file = tmp_path / "results" / "one.json"
    frame.write(file, [frame.row({}, "match", "us", [1.0, 3.0], [1.0, 2.0])], rounds=2)
    kept = json.loads(file.read_text())
    assert kept["sglang"] and kept["rounds"] == 2 and kept["rows"][0]["ratio"] == 0.75
    assert platform.node() not in kept.values()
    assert str(ROOT) not in file.read_text() and "/tmp" not in file.read_text()


def test_rounds_on_servers_give_medians_and_leave_out_what_one_could_not_take(bench: None) -> None:
    import servers

    def measured(stock: float, patched: float | None) -> list[dict[str, object]]:
        common = {"scenario": "burst", "ratio": None, "verdict": ""}
        return [
            {**common, "figure": "tokens equal", "unit": "%", "stock": 1.0, "patched": 1.0},
            {**common, "figure": "throughput", "unit": "tok/s", "stock": stock, "patched": 9.0},
            {**common, "figure": "p99", "unit": "s", "stock": 1.0, "patched": patched},
        ]

    equal, throughput = servers.rows([measured(4.0, 1.0), measured(2.0, None), measured(9.0, 1.0)])
    assert (equal["figure"], equal["stock"], equal["patched"]) == ("tokens equal", 100, 100)
    assert (throughput["stock"], throughput["patched"]) == (4.0, 9.0)


def test_a_window_is_compared_with_the_two_beside_it(bench: None) -> None:
    import windows

    # The machine slows down by half meanwhile; "on" costs a tenth, but for one window.
    speeds = [100.0 - step for step in range(51)]
    costs = {step: 0.9 if step % 2 else 1.0 for step in range(51)} | {25: 0.1}
    found = [
        windows.Window("on" if step % 2 else "off", speed * costs[step], {"digests": 0.001})
        for step, speed in enumerate(speeds)
    ]
    off, on = windows.rows(found)
    assert (off["setting"], on["setting"]) == ("off", "on")
    assert off["ratio"] == pytest.approx(1.0)
    assert on["ratio"] == pytest.approx(0.9)
    assert on["interval"] == (pytest.approx(0.9), pytest.approx(0.9))
    assert on["spent"] == {"digests": pytest.approx(0.001)}
    head, *lines = windows.table([off, on], {"more": ["1", "2"]}).splitlines()
    assert head.split() == ["tok/s", "of", "off", "95", "%", "interval", "more"]
    assert [line.split()[0] for line in lines] == ["off", "on"]


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.992, 1.01, "is shown"), (0.98, 1.01, "is not resolved"), (0.9, 0.98, "is refuted")],
)
def test_a_promise_is_shown_refuted_or_not_resolved(
    bench: None, low: float, high: float, said: str
) -> None:
    import windows

    told = windows.verdict({"setting": "on", "interval": (low, high)}, 0.01)
    assert told == f"on: throughput within 1% {said} (95 %: {low:.4f} to {high:.4f})"


def test_bursts_are_compared_with_those_that_followed_them(bench: None) -> None:
    import burst_servers

    def burst(seconds: float, error: str | None = None) -> burst_servers.Burst:
        slow, quick = Outcome((1, 2, 3), latency_s=seconds), Outcome((4,), latency_s=0.1)
        return burst_servers.Burst((replace(slow, error=error), quick), seconds)

    stock = [burst(1.0), burst(2.0), burst(20.0, "no complete reply"), burst(1.0)]
    patched = [burst(0.5), burst(1.0), burst(0.5), burst(0.5)]
    throughput, median, longest, failed = burst_servers.rows(stock, patched)
    assert (throughput["stock"], throughput["patched"]) == (4.0, 8.0)
    assert throughput["ratio"] == 2.0 and throughput["interval"] == (2.0, 2.0)
    assert (longest["figure"], longest["ratio"]) == ("latency max", 0.5)
    assert (median["figure"], median["stock"]) == ("latency p50", 1.0)
    assert (failed["stock"], failed["patched"]) == (1.0, 0.0)
    [told] = burst_servers.failures(stock, patched)
    assert burst_servers.said(told) == "round 3, stock: 1 x no complete reply"
    with pytest.raises(LabError, match="in all of 2 rounds but 0: round 1, stock: 1 x no comp"):
        burst_servers.rows(stock[2:3] * 2, patched[:2])


def test_other_tokens_are_no_figure_unless_their_request_failed(
    bench: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import burst_servers

    answers = {"one": Outcome((1, 2)), "other": Outcome((1, 3)), "ill": Outcome(error="503: no")}

    async def answer(url: str, requests: object, limit_s: float) -> list[Outcome]:
        return [answers[url]]

    monkeypatch.setattr(burst_servers, "send_all", answer)
    monkeypatch.setattr(burst_servers, "REST_S", 0.0)
    pairs = {name: SimpleNamespace(url=name) for name in answers}
    with pytest.raises(LabError, match="different tokens"):
        burst_servers.turns([pairs["one"], pairs["other"]], [], 2)
    one, ill = burst_servers.turns([pairs["one"], pairs["ill"]], [], 2)
    assert [each.failed for each in (*one, *ill)] == [0, 0, 1, 1]


def test_a_soak_keeps_its_figures_and_what_they_must_be(bench: None) -> None:
    import soak

    stuck = {"name": "stuck", "value": 0, "unit": "", "must": 0, "most": None, "noise": 0.1}
    measured = {"runs": [{"scenarios": [{"name": "faults", "figures": [stuck]}]}]}
    [row] = soak.rows(measured)
    assert row == {
        "scenario": "faults", "name": "stuck", "value": 0, "unit": "", "must": 0, "most": None
    }  # fmt: skip
    assert soak.table([row]) == "faults    stuck                                        0"
