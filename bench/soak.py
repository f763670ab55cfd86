# SPDX-License-Identifier: Apache-2.0
"""What ten minutes of mixed traffic and broken servers come to on a patched pair.

    bench/soak.py --patched build/0.5.23/python [--json FILE]

`pdlab run soak faults`, whose figures are kept. Nothing is compared: what must be nought is nought.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import frame

from pdlab.figures import Figure, show

SCENARIOS = ("soak", "faults")
KEPT = ("name", "value", "unit", "must", "most")


def rows(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The figures of what `pdlab run --json` wrote, and what they must be."""
    return [
        {"scenario": scenario["name"], **{key: figure[key] for key in KEPT}}
        for run in measured["runs"]
        for scenario in run["scenarios"]
        for figure in scenario["figures"]
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows for a reader."""
    lines = []
    for row in rows:
        figure = Figure(**{key: row[key] for key in KEPT})
        lines.append(f"{row['scenario']:<9} {figure.name:<36} {show(figure):>9}")
    return "\n".join(lines)


def main() -> int:
    """The exit status of `pdlab`: 1 when a figure is not as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--patched", type=Path, required=True, metavar="PATH",
                        help="`python` folder of a built tree")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "result.json"
        words = ["run", *SCENARIOS, "--tree", str(given.patched.parent), "--json", str(file)]
        # Its table names the tree: to be seen, not kept.
        code = subprocess.run([sys.executable, "-m", "pdlab", *words], stdout=2).returncode
        if file.exists():
            found = rows(json.loads(file.read_text()))
            print(table(found))
            frame.write(given.json, found)
    return code


if __name__ == "__main__":
    sys.exit(main())
