# SPDX-License-Identifier: Apache-2.0
"""The benchmarks that measure running pairs reach what they measure, and see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from built import TREE, on_servers

BENCH = Path(__file__).parents[2] / "bench"
ROUNDS = 30
pytestmark = on_servers


def measured(
    name: str, tmp_path: Path, rounds: int = ROUNDS, by: str = "setting"
) -> dict[str, dict[str, Any]]:
    """The rows of a short run, by setting."""
    file = tmp_path / "figures.json"
    words = ("--patched", TREE / "python", "--rounds", str(rounds), "--json", file)
    done = subprocess.run([sys.executable, BENCH / name, *words], capture_output=True, text=True)
    assert file.exists(), done.stderr[-2000:]
    return {row[by]: row for row in json.loads(file.read_text())["rows"]}


def test_digests_take_time_on_both_ends_only_while_they_are_on(tmp_path: Path) -> None:
    rows = measured("handoff_digest_servers.py", tmp_path)
    assert list(rows) == ["absent", "off", "1 %"]
    assert all(row["throughput"] > 0 for row in rows.values())
    assert all(share > 0 for share in rows["1 %"]["shares"].values())
    assert set(rows["off"]["shares"].values()) == {0.0}
    assert set(rows["absent"]["shares"].values()) == {0.0}


def test_probes_take_time_of_the_process_that_speaks_http(tmp_path: Path) -> None:
    rows = measured("health_probe_servers.py", tmp_path)
    assert list(rows) == ["quiet", "10 a second", "50 a second"]
    assert all(row["throughput"] > 0 for row in rows.values())
    quiet, most = (rows[name]["spent"]["HTTP"] for name in ("quiet", "50 a second"))
    assert most > quiet


def test_a_burst_is_answered_by_a_stock_and_a_patched_pair_in_turns(tmp_path: Path) -> None:
    rows = measured("burst_servers.py", tmp_path, rounds=3, by="figure")
    assert list(rows) == ["throughput", "latency p50", "latency max", "requests failed"]
    assert rows.pop("requests failed")["patched"] == 0
    for row in rows.values():
        assert row["requests"] == 64 and row["stock"] > 0 and row["patched"] > 0
    assert rows["latency p50"]["patched"] <= rows["latency max"]["patched"]
