# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the page about metrics name the metrics that servers have, and all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docs" / "grafana" / "pd-series.json"
PAGE = ROOT / "docs" / "metrics.md"
MODULE = ROOT / "python" / "sglang" / "srt" / "disaggregation" / "pd_metrics.py"
SAMPLES = ("_bucket", "_sum", "_count")
UPSTREAM = {"sglang:spec_accept_length", "sglang:num_running_reqs"}


def named(text: str) -> set[str]:
    """Names of metrics in a text, without what a histogram's samples add to them."""
    found = set()
    for name in re.findall(r"sglang:\w+", text):
        suffix = next((each for each in SAMPLES if name.endswith(each)), "")
        found.add(name.removesuffix(suffix))
    return found


@pytest.fixture(scope="module")
def metrics() -> set[str]:
    """What the series' module registers."""
    return set(re.findall(r'name="(sglang:\w+)"', MODULE.read_text()))


def test_the_dashboard_shows_every_metric_and_no_other(metrics: set[str]) -> None:
    assert len(metrics) >= 8
    assert named(DASHBOARD.read_text()) == metrics | UPSTREAM


def test_the_page_tells_of_every_metric_and_no_other(metrics: set[str]) -> None:
    assert named(PAGE.read_text()) == metrics | UPSTREAM - {"sglang:num_running_reqs"}


def test_every_panel_has_a_query_a_unit_and_a_place_of_its_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["targets"] and panel["description"], panel["title"]
        place = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & mine, panel["title"]
        assert max(x for x, _ in mine) < 24
        cells |= mine
    assert len({panel["id"] for panel in panels}) == len(panels)
