# SPDX-License-Identifier: Apache-2.0
"""Accept length, throughput under pressure and health latency on real servers, both trees in turns.

    bench/servers.py --patched build/0.5.23/python [--rounds 3] [--json FILE] [SCENARIO…]

Each round is one `pdlab compare`: servers from stock, then from the patched tree. Without a GPU
stock is SGLang with the patch `cpu-pd`, as everywhere in the lab.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import frame

SCENARIOS = ("pressure", "republish", "layers", "health")


def one_round(tree: Path, scenarios: Sequence[str]) -> tuple[int, list[dict[str, Any]]]:
    """The exit status of one comparison, and its rows; none when servers did not start."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "result.json"
        words = ["compare", *scenarios, "--tree", str(tree), "--json", str(file)]
        # Its tables are of one round: to be seen, not kept.
        code = subprocess.run([sys.executable, "-m", "pdlab", *words], stdout=2).returncode
        return code, json.loads(file.read_text())["comparison"] if file.exists() else []


def rows(rounds: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Medians over the rounds; figures that a round could not take are left out."""
    found = []
    for same in zip(*rounds, strict=True):
        case = {"scenario": same[0]["scenario"]}
        stock, patched = ([one[tree] for one in same] for tree in ("stock", "patched"))
        if None not in (*stock, *patched):
            name, unit = same[0]["figure"], same[0]["unit"]
            scale = 100 if unit == "%" else 1  # pdlab has shares of 1
            both = ([scale * value for value in values] for values in (stock, patched))
            found.append(frame.row(case, name, unit, *both))
    return found


def main() -> int:
    """1 when tokens differ or a request failed that must not, in any round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenario", nargs="*", default=SCENARIOS, help=f"{' '.join(SCENARIOS)}")
    parser.add_argument("--patched", type=Path, required=True, metavar="PATH",
                        help="`python` folder of a built tree")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="2 or more; default 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("one round has no spread: --rounds 2 or more")
    tree = given.patched.parent
    done = [one_round(tree, given.scenario) for _ in range(given.rounds)]
    codes, rounds = zip(*done, strict=True)
    if not all(rounds):
        return 1
    found = rows(rounds)
    print(frame.table(("scenario",), found))
    frame.write(given.json, found, rounds=given.rounds)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
