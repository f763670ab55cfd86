# SPDX-License-Identifier: Apache-2.0
"""The page shows what the JSON holds, in a real browser, in both colour schemes, to everyone."""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import browser
import pytest

from pdlab import page, report
from pdlab.errors import LabError
from pdlab.figures import Figure, show
from pdlab.health import Probe
from pdlab.occupancy import Sample
from pdlab.runner import ScenarioRun, TreeRun
from pdlab.scenarios import SCENARIOS
from pdlab.scenarios.model import Observation, WaveResult
from pdlab.traffic import Outcome, Request
from pdlab.trees import Tree

VOCAB = 512
NAMES = ("parity", "prefix", "pressure", "health")
# WCAG 2.2, 1.4.3 and 1.4.11: text, and what else has to be told apart.
TEXT_CONTRAST, MARK_CONTRAST = 4.5, 3.0
MAKES_REQUESTS = re.compile(r"""(?:src|href)=["'](?!#|data:)|url\(|@import""")


def tree_run(label: str, seed: int, accepted: float, probe_s: float) -> TreeRun:
    """A run of the usual scenarios whose outcomes are drawn at random."""
    draw = random.Random(seed)

    def outcome(request: Request, scenario: str) -> Outcome:
        return Outcome(
            tokens=(1, 2, 3),
            accept_length=draw.uniform(accepted - 0.2, accepted),
            retractions=int(scenario == "pressure" and draw.random() < 0.8),
            cached_tokens=96 if draw.random() < 0.5 else 0,
            latency_s=draw.uniform(1, 3),
            status=200,
        )

    def sample(number: int) -> Sample:
        held = draw.randrange(8)
        if label == "stock":
            return Sample(number * 0.25, {}, {"transfer": held})
        return Sample(number * 0.25, {"free": 64 - held, "waiting": held}, {"transfer": 0})

    runs = []
    for name in NAMES:
        scenario = SCENARIOS[name]
        waves = tuple(
            WaveResult(
                wave,
                tuple(outcome(request, name) for request in wave.requests),
                tuple(Probe(n / 10, draw.uniform(1, 2) * probe_s, 200) for n in range(40))
                if wave.probes
                else (),
                5.0 / accepted,
                {},
                () if wave.probes else tuple(sample(number) for number in range(12)),
            )
            for wave in scenario.waves(VOCAB)
        )
        reference = {r.key: (1, 2, 3) for wave in waves for r in wave.wave.requests}
        figures = tuple(scenario.figures(Observation(waves, reference)))
        runs.append(ScenarioRun(scenario, figures, (waves,), 5.0))
    patches = ("series-stamp", "cpu-pd")
    tree = Tree(label, "0.5.23", patches, Path("/trees") / label, "a </script> note")
    commands = {"default settings": (("python", "-m", "sglang.launch_server"),)}
    return TreeRun(tree, tuple(runs), commands, (4.5,))


@pytest.fixture(scope="module")
def content() -> Any:
    """A comparison as it stands in the JSON file."""
    runs = tree_run("stock", 1, 1.5, 1.0), tree_run("patched", 2, 3.9, 0.01)
    command = ["pdlab", "compare", "--html", "<report>"]
    return json.loads(json.dumps(report.as_json(command, runs, report.rows(*runs))))


@pytest.fixture(scope="module")
def path(content: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page.write(tmp_path_factory.mktemp("page") / "report", content)


def requests_of(content: Any, label: str, scenario: str) -> Iterator[Any]:
    [run] = [run for run in content["runs"] if run["label"] == label]
    [found] = [each for each in run["scenarios"] if each["name"] == scenario]
    for waves in found["rounds"]:
        for wave in waves:
            yield from wave["requests"]


def waves_of(content: Any, label: str) -> dict[str, Any]:
    [run] = [run for run in content["runs"] if run["label"] == label]
    return {
        wave["name"]: wave
        for scenario in run["scenarios"]
        for waves in scenario["rounds"]
        for wave in waves
    }


# What the page says in a browser: every table as text, every plot as Plotly has drawn it.
READ = """({
  tables: Object.fromEntries([...document.querySelectorAll("table")].map((table) => [
    table.caption.textContent.trim(),
    [...table.querySelectorAll("tbody tr")].map((row) => [...row.cells].map(
      (cell) => cell.textContent.replace(/\\s+/g, " ").trim())),
  ])),
  plots: Object.fromEntries([...document.querySelectorAll(".plot")].map((plot) => [
    plot.id,
    {traces: plot.data.map((t) => ({name: t.name, x: [...t.x], y: [...t.y],
                                    color: (t.line && t.line.color) || t.marker.color})),
     drawn: plot.querySelectorAll("svg .trace").length,
     label: plot.getAttribute("aria-label")},
  ])),
  scheme: document.documentElement.dataset.drawn,
  wide: document.documentElement.scrollWidth > innerWidth,
})"""


@pytest.fixture(scope="module")
def seen(path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a real browser makes of the page in each scheme, and what it complained of."""
    if browser.find() is None:
        pytest.skip(f"no browser, one of {', '.join(browser.NAMES)}: make setup installs the first")

    async def look() -> dict[str, Any]:
        async with browser.opened(path) as tab:
            found: dict[str, Any] = {}
            await tab.until("document.readyState === 'complete'")
            for scheme in ("light", "dark"):
                await tab.scheme(scheme)
                await tab.until(f"document.documentElement.dataset.drawn === '{scheme}'")
                found[scheme] = await tab.evaluate(READ)
                await tab.screenshot(path.parent / f"{scheme}.png")
            await tab.scheme("light", width=360)
            # Plots follow the window a moment later.
            await tab.until("innerWidth === 360 && document.documentElement.scrollWidth <= 360")
            found["narrow"] = await tab.evaluate(READ)
            found["tree"] = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
            await tab.press("Tab")
            found["first stop"] = await tab.evaluate("document.activeElement.textContent")
            await tab.press("Enter")
            found["then"] = await tab.evaluate("document.activeElement.id")
            found["stops"] = await tab.evaluate(STOPS)
            return {**found, "complaints": tab.complaints, "requests": tab.requests}

    return asyncio.run(look())


STOPS = """[...document.querySelectorAll(".scroll, pre")].every((each) => each.tabIndex === 0)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_table_says_what_the_json_says(seen: Any, content: Any, scheme: str) -> None:
    rows = [row for row in seen[scheme]["tables"]["Stock beside patched, by scenario"] if row[1:]]
    assert len(rows) == len(content["comparison"])
    for row, each in zip(rows, content["comparison"], strict=True):
        stock, patched = (show(Figure("", each[of], each["unit"])) for of in ("stock", "patched"))
        assert row[:3] == [each["figure"], stock, patched]
        assert row[3] == ("" if each["ratio"] is None else f"{each['ratio']:.2f}")
        assert row[4].lstrip("▲▼=◇ ") == each["verdict"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accept_length_is_that_of_the_requests(seen: Any, content: Any, scheme: str) -> None:
    kinds = (
        ("pressure", True, None),
        ("pressure", False, None),
        ("prefix", False, True),
        ("prefix", False, False),
        ("parity", False, None),
    )
    names = (
        "pressure, retracted",
        "pressure, undisturbed",
        "prefix, cached prefix",
        "prefix, undisturbed",
        "parity, undisturbed",
    )
    [table] = [rows for name, rows in seen[scheme]["tables"].items() if name.startswith("Accept")]
    cells = {row[0]: row[1:] for row in table}
    assert {*names, "health, undisturbed"} == set(cells)
    drawn = seen[scheme]["plots"]["accept-length-plot"]
    for trace, label, first in zip(drawn["traces"], ("stock", "patched"), (0, 4), strict=True):
        assert trace["name"] == label
        for name, (scenario, retracted, cached) in zip(names, kinds, strict=True):
            lengths = [
                request["accept_length"]
                for request in requests_of(content, label, scenario)
                if bool(request["retractions"]) == retracted
                and cached in (None, bool(request["cached_tokens"]))
            ]
            mean = statistics.fmean(lengths)
            assert cells[name][first : first + 2] == [str(len(lengths)), f"{mean:.2f}"]
            place = list(cells).index(name)
            assert trace["x"][place] == pytest.approx(mean)
            assert trace["y"][place] == pytest.approx(place, abs=0.3)
            assert f"{name}: stock " in drawn["label"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_throughput_is_that_of_the_comparison(seen: Any, content: Any, scheme: str) -> None:
    traces = seen[scheme]["plots"]["throughput-plot"]["traces"]
    measured = [each for each in content["comparison"] if each["unit"] == "tok/s"]
    assert [trace["name"] for trace in traces] == ["stock", "patched"]
    for trace in traces:
        assert trace["x"] == pytest.approx([each[trace["name"]] for each in measured])
        assert trace["y"] == [each["scenario"] for each in measured]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_probe_is_in_its_curve(seen: Any, content: Any, scheme: str) -> None:
    traces = iter(seen[scheme]["plots"]["health-plot"]["traces"])
    for wave in ("idle", "burst"):
        for label in ("stock", "patched"):
            trace = next(traces)
            times = sorted(p["latency_s"] for p in waves_of(content, label)[wave]["probes"])
            assert trace["name"] == label
            assert trace["x"] == pytest.approx(times)
            assert trace["y"][-1] == 1.0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_look_at_the_rows_is_in_its_line(seen: Any, content: Any, scheme: str) -> None:
    traces = seen[scheme]["plots"]["occupancy-plot"]["traces"]
    pressed = {label: waves_of(content, label)["pressure"] for label in ("stock", "patched")}
    assert [sample["held"] for sample in pressed["stock"]["samples"]] == [
        sample["requests"]["transfer"] for sample in pressed["stock"]["samples"]
    ]
    looked_at = [
        scenario["name"]
        for scenario in content["runs"][0]["scenarios"]
        if any(wave["samples"] for waves in scenario["rounds"] for wave in waves)
    ]
    assert len(traces) == 2 * len(looked_at)
    place = 2 * looked_at.index("pressure")
    for trace, label in zip(traces[place : place + 2], ("stock", "patched"), strict=True):
        samples = pressed[label]["samples"]
        assert trace["y"] == [sample["held"] for sample in samples]
        assert trace["x"] == pytest.approx([sample["at_s"] for sample in samples])


def test_the_console_has_no_complaint_and_nothing_is_fetched(seen: Any, path: Path) -> None:
    assert seen["complaints"] == []
    assert {url for url in seen["requests"] if not url.startswith("data:")} == {path.as_uri()}


def test_plots_are_drawn_in_the_colours_of_their_scheme(seen: Any) -> None:
    for name, plot in seen["light"]["plots"].items():
        dark = seen["dark"]["plots"][name]
        assert plot["drawn"] == dark["drawn"] >= len({trace["name"] for trace in plot["traces"]})
        for light_trace, dark_trace in zip(plot["traces"], dark["traces"], strict=True):
            assert light_trace["color"] != dark_trace["color"]
    assert len({trace["color"] for trace in seen["light"]["plots"]["health-plot"]["traces"]}) == 2


def test_a_narrow_window_does_not_scroll_sideways(seen: Any) -> None:
    assert not seen["narrow"]["wide"]
    assert not seen["light"]["wide"]


def test_the_keyboard_reaches_everything(seen: Any) -> None:
    assert seen["first stop"] == "Skip to the verdict"
    assert seen["then"] == "main"
    assert seen["stops"]


def test_a_screen_reader_hears_headings_landmarks_and_every_plot(seen: Any) -> None:
    heard = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in seen["tree"]
        if not node.get("ignored")
    ]
    roles = {role for role, _ in heard}
    assert {"main", "navigation", "banner", "contentinfo", "table", "heading"} <= roles
    pictures = [name for role, name in heard if role in ("image", "img") and name]
    assert len(pictures) == 4
    assert all("stock" in name and "patched" in name for name in pictures)
    assert all(name for role, name in heard if role in ("table", "region", "link", "heading"))


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_apart(scheme: int) -> None:
    style = (Path(page.__file__).parent / "style.css").read_text()
    named = [dict(re.findall(r"--([\w-]+): (#\w{6})", rules)) for rules in style.split("@media")]
    colours = named[scheme]
    for name in ("text", "muted", "stock", "patched"):
        for back in ("page", "card", "plain-back"):
            assert contrast(colours[name], colours[back]) >= TEXT_CONTRAST, (name, back)
    for name in ("good", "bad", "mixed"):
        assert contrast(colours[name], colours[f"{name}-back"]) >= TEXT_CONTRAST, name
    assert contrast(colours["patched"], colours["card"]) >= MARK_CONTRAST


class Outline(HTMLParser):
    """The headings' levels, the ids, and what links point at."""

    def __init__(self) -> None:
        super().__init__()
        self.levels: list[int] = []
        self.ids: list[str] = []
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        if given.get("id"):
            self.ids.append(given["id"] or "")
        targets = [given.get("aria-labelledby"), (given.get("href") or "").removeprefix("#")]
        self.targets += [target for target in targets if target and target != "data:,"]


def test_the_page_is_whole_without_a_script(content: Any, path: Path) -> None:
    html = path.read_text()
    outline = Outline()
    outline.feed(html)
    assert outline.levels[0] == 1 and outline.levels.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(outline.levels, outline.levels[1:], strict=False))
    assert len(set(outline.ids)) == len(outline.ids)
    assert set(outline.targets) <= set(outline.ids)
    own = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert not MAKES_REQUESTS.search(own)
    assert html.count("plotly.js v") == 1
    assert "&lt;report&gt;" in own and "a &lt;/script&gt; note" in own
    for each in content["comparison"]:
        assert each["figure"] in own


def test_the_verdict_comes_first(content: Any) -> None:
    html = page.render(content)
    better = sum(each["verdict"] == "better" for each in content["comparison"])
    assert 0 < html.index(f"better than stock in {better} figures") < html.index("<table")
    assert "every answer has the tokens" in html
    wrong = json.loads(json.dumps(content))
    [tokens, *_] = wrong["runs"][1]["scenarios"][2]["figures"]
    tokens["value"] = 0.5
    said = page.render(wrong)
    assert "pressure: tokens equal aggregated is 50.0% on the patched tree and must be 100%" in said
    assert "every answer has the tokens" not in said


def test_what_was_not_measured_says_so(content: Any) -> None:
    little = json.loads(json.dumps(content))
    for run in little["runs"]:
        run["scenarios"] = run["scenarios"][:1]
        for wave in run["scenarios"][0]["rounds"][0]:
            wave["samples"] = []
    little["comparison"] = [e for e in little["comparison"] if e["scenario"] == "parity"]
    html = page.render(little)
    assert "No scenario of this run probes the health of a server" in html
    assert "The decode server was not looked at in this run." in html
    assert "No scenario of this run measures throughput." in html
    assert html.count('role="img"') == 1


def test_a_place_that_cannot_be_written_is_named(content: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LabError, match=r"cannot write .*file/index\.html"):
        page.write(tmp_path / "file", content)
