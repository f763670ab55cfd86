# SPDX-License-Identifier: Apache-2.0
"""The table and the JSON say the same, and say it of the right tree."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from pdlab import report
from pdlab.errors import LabError
from pdlab.figures import Better, Figure
from pdlab.runner import ScenarioRun, TreeRun
from pdlab.scenarios import SCENARIOS
from pdlab.scenarios.model import Wave, WaveResult
from pdlab.traffic import Outcome, Request
from pdlab.trees import Tree


def tree_run(label: str, accept: float, right: float = 1.0) -> TreeRun:
    figures = (
        Figure("tokens equal aggregated", right, "%", Better.HIGHER, must=1.0),
        Figure("accept length, retracted", accept, "", Better.HIGHER, aim=True),
        Figure("retractions", 292.0),
    )
    outcome = Outcome((1, 2, 3), accept, 2, 0, 1.5, None, 200)
    wave = WaveResult(Wave("pressure", (Request((5, 6), 3),)), (outcome,), (), 1.5)
    run = ScenarioRun(SCENARIOS["pressure"], figures, ((wave,),), 2.0)
    tree = Tree(label, "0.5.23", ("cpu-pd",), Path("/trees") / label, "a note")
    return TreeRun(tree, (run,), {"default settings": (("python",),)}, (4.5,))


def text(view: object) -> str:
    console = Console(file=StringIO(), width=110)
    console.print(view)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_comparison_has_a_row_per_figure_with_ratio_and_verdict() -> None:
    rows = report.rows(tree_run("stock", 1.36), tree_run("patched", 3.75))
    lines = [line.split() for line in text(report.comparison(rows)).splitlines()]
    assert ["scenario", "figure", "stock", "patched", "ratio", "verdict"] in lines
    assert ["pressure", "tokens", "equal", "aggregated", "100%", "100%", "1.00", "same"] in lines
    assert ["accept", "length,", "retracted", "1.36", "3.75", "2.76", "better"] in lines
    assert ["retractions", "292", "292", "1.00"] in lines
    assert report.summary(rows) == "patched beside stock: 1 better, 1 same"


def test_what_is_not_better_says_so() -> None:
    rows = report.rows(tree_run("stock", 1.36), tree_run("patched", 1.37))
    assert "not better yet" in text(report.comparison(rows))
    assert "1 not better yet" in report.summary(rows)


def test_the_json_holds_figures_requests_and_what_made_them(tmp_path: Path) -> None:
    runs = tree_run("stock", 1.36), tree_run("patched", 3.75)
    content = report.as_json(["pdlab", "compare"], runs, report.rows(*runs))
    file = tmp_path / "result.json"
    report.write(file, content)
    read = json.loads(file.read_text())
    assert read["command"] == ["pdlab", "compare"]
    assert read["versions"]["python"]
    stock, patched = read["runs"]
    assert (stock["label"], patched["label"]) == ("stock", "patched")
    assert patched["patches"] == ["cpu-pd"]
    assert patched["startup_s"] == [4.5]
    [scenario] = patched["scenarios"]
    assert scenario["settings"]["decode_kv_tokens"] == 1200
    [[wave]] = scenario["rounds"]
    [request] = wave["requests"]
    assert request["accept_length"] == 3.75
    assert (request["prompt_tokens"], request["new_tokens"], request["retractions"]) == (2, 3, 2)
    row = read["comparison"][1]
    assert (row["stock"], row["patched"], row["verdict"]) == (1.36, 3.75, "better")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_what_must_hold_and_does_not_is_listed() -> None:
    assert tree_run("patched", 3.75).broken == []
    [line] = tree_run("patched", 3.75, right=0.5).broken
    assert line.startswith("pressure: tokens equal aggregated is 50.0%")
    assert "50.0%" in text(report.table(tree_run("patched", 3.75, right=0.5)))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="is a directory"):
        report.require_writable(tmp_path)
    with pytest.raises(LabError, match="cannot write /proc/none"):
        report.require_writable(Path("/proc/none"))
    file = tmp_path / "deep" / "result.json"
    report.require_writable(file)
    assert list(file.parent.iterdir()) == []
