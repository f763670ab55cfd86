# SPDX-License-Identifier: Apache-2.0
"""Every side-by-side figure this project claims, one after the other; results as JSON files.

bench/all.py [--tree build/0.5.23] [--results bench/results] [NAME…]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
# On SGLang's real classes, in processes that take turns.
CLASSES = (
    "metadata_slots",
    "queue_pass",
    "retraction_backup",
    "page_contract",
    "handoff_digest",
)
# On real servers: scenarios, and of how many rounds the figures are medians.
SERVERS = {"burst": 5, "pressure": 3, "health": 1, "layers": 1, "republish": 1}


def commands(tree: Path, results: Path) -> dict[str, list[str]]:
    """The command of each benchmark by name."""
    patched = str(tree / "python")
    found = {
        name: [sys.executable, str(HERE / f"{name}.py"), "--patched", patched] for name in CLASSES
    }
    found["seam_speed"] = [sys.executable, str(HERE / "seam_speed.py")]
    for name, rounds in SERVERS.items():
        words = ["compare", name, "--rounds", str(rounds), "--tree", str(tree)]
        found[name] = [sys.executable, "-m", "pdlab", *words]
    return {
        name: [*command, "--json", str(results / f"{name}.json")] for name, command in found.items()
    }


def main() -> int:
    """Run them; 1 when one of them says that it does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "name", nargs="*", help=f"of {', '.join([*CLASSES, 'seam_speed', *SERVERS])}"
    )
    parser.add_argument("--tree", type=Path, default=Path("build/0.5.23"), metavar="DIR")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    given = parser.parse_args()
    found = commands(given.tree, given.results)
    if unknown := set(given.name) - found.keys():
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(found)}")
    given.results.mkdir(parents=True, exist_ok=True)
    short = []
    for name in given.name or found:
        print(f"\n== {name}", flush=True)
        if subprocess.run(found[name]).returncode:
            short.append(name)
    if short:
        print(f"\nbelow what is promised: {', '.join(short)}", file=sys.stderr)
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
