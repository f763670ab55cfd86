# SPDX-License-Identifier: Apache-2.0
"""Results for people and for machines: tables on the terminal, JSON in a file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.table import Table

from pdlab.errors import LabError
from pdlab.figures import Figure, Verdict, ratio, show, verdict
from pdlab.runner import ScenarioRun, TreeRun
from pdlab.scenarios.model import WaveResult

SCHEMA = 1
PACKAGES = ("sglang", "sglang-router", "torch", "triton", "transformers")
MOONCAKE = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
COLOURS = {
    Verdict.BETTER: "green",
    Verdict.WORSE: "bold red",
    Verdict.NOT_YET: "yellow",
    Verdict.SAME: "dim",
    Verdict.NONE: "dim",
}


@dataclass(frozen=True)
class Row:
    """One figure of both trees."""

    scenario: str
    stock: Figure
    patched: Figure

    @property
    def ratio(self) -> float | None:
        return ratio(self.stock, self.patched)

    @property
    def verdict(self) -> Verdict:
        return verdict(self.stock, self.patched)


def rows(stock: TreeRun, patched: TreeRun) -> list[Row]:
    """The figures of two runs of the same scenarios, side by side."""
    return [
        Row(run.scenario.name, left, right)
        for run in stock.scenarios
        for left, right in zip(run.figures, patched.of(run.scenario.name).figures, strict=True)
    ]


def table(run: TreeRun) -> Table:
    """The figures of one tree."""
    view = _table("figure", run.tree.label)
    for each in run.scenarios:
        view.add_section()
        for number, figure in enumerate(each.figures):
            name = each.scenario.name if number == 0 else ""
            value = show(figure) if figure.holds else f"[bold red]{show(figure)}[/]"
            view.add_row(name, figure.name, value)
    return view


def comparison(compared: Sequence[Row]) -> Table:
    """Stock and patched with ratio and verdict."""
    view = _table("figure", "stock", "patched", "ratio", "verdict")
    last = ""
    for row in compared:
        if row.scenario != last:
            view.add_section()
        verdict_text = f"[{COLOURS[row.verdict]}]{row.verdict.value}[/]"
        ratio_text = "" if row.ratio is None else f"{row.ratio:.2f}"
        name = row.scenario if row.scenario != last else ""
        view.add_row(
            name, row.patched.name, show(row.stock), show(row.patched), ratio_text, verdict_text
        )
        last = row.scenario
    return view


def summary(compared: Sequence[Row]) -> str:
    """How many rows have which verdict, in one line."""
    counts = Counter(row.verdict.value for row in compared if row.verdict.value)
    parts = [f"{counts[each.value]} {each.value}" for each in Verdict if counts[each.value]]
    return "patched beside stock: " + ", ".join(parts)


def as_json(command: Sequence[str], runs: Sequence[TreeRun], compared: Sequence[Row]) -> Any:
    """Everything that was measured, and with what."""
    return {
        "schema": SCHEMA,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(command),
        "versions": versions(),
        "machine": {
            "processor": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
        },
        "runs": [_run(run) for run in runs],
        "comparison": [
            {
                "scenario": row.scenario,
                "figure": row.patched.name,
                "unit": row.patched.unit,
                "stock": row.stock.value,
                "patched": row.patched.value,
                "ratio": row.ratio,
                "verdict": row.verdict.value,
            }
            for row in compared
        ],
    }


def require_writable(path: Path) -> None:
    """Raise LabError, before anything is measured, when `write` could not write there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = _scratch(path)
        scratch.touch()
        scratch.unlink()
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror}") from error
    if path.is_dir():
        raise LabError(f"cannot write {path}: it is a directory")


def write(path: Path, content: Any, indent: int | None = 1) -> None:
    """Write JSON whole or not at all; LabError when it cannot be written."""
    try:
        _scratch(path).write_text(json.dumps(content, indent=indent) + "\n")
        _scratch(path).replace(path)
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror}") from error


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def versions() -> dict[str, str]:
    """The packages a run depends on; those that are not installed left out."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *MOONCAKE):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _table(*columns: str) -> Table:
    view = Table(box=None, pad_edge=False, header_style="bold")
    view.add_column("scenario", no_wrap=True)
    for name in columns:
        plain = name in ("figure", "verdict")
        view.add_column(name, justify="left" if plain else "right", no_wrap=True)
    return view


def _run(run: TreeRun) -> dict[str, Any]:
    return {
        "label": run.tree.label,
        "release": run.tree.release,
        "patches": list(run.tree.patches),
        "tree": str(run.tree.python.parent) if run.tree.python else "installed",
        "note": run.tree.note,
        "startup_s": list(run.startup_s),
        "commands": run.commands,
        "scenarios": [_scenario(each) for each in run.scenarios],
    }


def _scenario(run: ScenarioRun) -> dict[str, Any]:
    return {
        "name": run.scenario.name,
        "about": run.scenario.about,
        "settings": asdict(run.scenario.settings),
        "seconds": run.seconds,
        "figures": [_figure(figure) for figure in run.figures],
        "rounds": [[_wave(wave) for wave in waves] for waves in run.rounds],
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {**asdict(figure), "better": figure.better.value}


def _wave(result: WaveResult) -> dict[str, Any]:
    requests = [
        {
            **{name: value for name, value in asdict(outcome).items() if name != "tokens"},
            "prompt_tokens": len(request.prompt),
            "new_tokens": len(outcome.tokens),
            "stream": request.stream,
        }
        for request, outcome in zip(result.wave.requests, result.outcomes, strict=True)
    ]
    return {
        "name": result.wave.name,
        "seconds": result.seconds,
        "requests": requests,
        "probes": [asdict(probe) for probe in result.probes],
        "samples": [asdict(sample) | {"held": sample.held} for sample in result.samples],
        "http": [asdict(probe) for probe in result.http],
        "counts": result.counts,
        "digests": result.digests,
    }
