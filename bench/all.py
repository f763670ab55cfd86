# SPDX-License-Identifier: Apache-2.0
"""Every side-by-side figure this project claims, one after the other: `make bench`.

bench/all.py [--tree build/0.5.23] [--results bench/results] [NAME…]

Each leaves a JSON file with its figures and what they were measured on, and its table; README.md
beside them shows all tables that are there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
# What is measured, and what it is called above its table; together three quarters of an hour.
BENCHES = {
    "metadata_slots": "Commit and prebuilt builder of a decode server",
    "queue_pass": "A scheduler pass over a long queue",
    "retraction_backup": "Backup and restore of a retracted request",
    "page_contract": "Matching a prompt for a new round",
    "handoff_digest": "Signing and checking a metadata row",
    "handoff_digest_servers": "A pair with digests off, and on for 1 % of the rows",
    "health_probe_servers": "A pair that is asked for its health ten times a second",
    "burst_servers": "A burst on a stock and a patched pair",
    "seam_speed": "seam itself",
    "servers": "Real servers",
}
ASKED_FOR = {"soak": "Mixed traffic and broken servers"}
"""Run by `make soak` and not with the others."""
HEAD = """\
# Results

Written by `make bench` and `make soak`; [what each is](../README.md). Stock and patched took turns
in one run; ± is half the distance of the quartiles.
"""


def command(name: str, tree: Path, results: Path) -> list[str]:
    """The command of a benchmark."""
    words = [sys.executable, str(HERE / f"{name}.py"), "--json", str(results / f"{name}.json")]
    return words if name == "seam_speed" else [*words, "--patched", str(tree / "python")]


def run(words: list[str], table: Path) -> int:
    """Run one, show what it prints and keep it; its exit status."""
    told = []
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            told.append(line.rstrip())
    table.write_text("\n".join(told).strip() + "\n")
    return process.returncode


def report(results: Path) -> None:
    """README.md with the tables that are there."""
    parts = [HEAD]
    for name, title in (BENCHES | ASKED_FOR).items():
        if (table := results / f"{name}.txt").exists():
            parts.append(
                f"## {title}\n\n[{name}.json]({name}.json)\n\n```\n{table.read_text()}```\n"
            )
    (results / "README.md").write_text("\n".join(parts))


def main() -> int:
    """Run them; 1 when one of them says that it does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="*", help=f"of {', '.join(BENCHES)}, all by default; "
                        f"or {', '.join(ASKED_FOR)}")  # fmt: skip
    parser.add_argument("--tree", type=Path, default=Path("build/0.5.23"), metavar="DIR")
    parser.add_argument("--results", type=Path, default=HERE / "results", metavar="DIR")
    given = parser.parse_args()
    known = BENCHES | ASKED_FOR
    if unknown := set(given.name) - known.keys():
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    given.results.mkdir(parents=True, exist_ok=True)
    short = []
    for name in given.name or BENCHES:
        print(f"\n== {name}", flush=True)
        begin = time.monotonic()
        if run(command(name, given.tree, given.results), given.results / f"{name}.txt"):
            short.append(name)
        print(f"   {time.monotonic() - begin:.0f} s", flush=True)
        report(given.results)
    if short:
        print(f"\nbelow what is promised: {', '.join(short)}", file=sys.stderr)
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
