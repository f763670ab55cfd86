# SPDX-License-Identifier: Apache-2.0
"""What digests cost a pair under the traffic of `burst`: off, and on for 1 % of the rows.

    bench/handoff_digest_servers.py --patched build/0.5.23/python [--rounds N] [--json FILE]

One pair, whose digests are turned every tenth of a second (windows.py). "Absent" skips the hooks of
the series; against it, digests that are off cost nothing. What no throughput resolves is counted:
the share of each scheduler's processor time that is spent in the digests themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import windows

from pdlab.control import schedulers
from pdlab.models import digest_switch
from pdlab.models.digest_switch import ABSENT, CHECKING_NS, OFF, PER_CENT, SIGNING_NS

ROUNDS = 2000
SWITCH_FILE = "digest-switch"
SETTINGS = {"absent": ABSENT, "off": OFF, "1 %": 1}
"""What the switch is set to; throughput is compared with the first."""
PROMISED = {"off": 0.01, "1 %": 0.01}
"""Most that a setting may cost of throughput, and of either scheduler's processor time."""
ENDS = {"prefill": SIGNING_NS, "decode": CHECKING_NS}


def measure(given: argparse.Namespace) -> list[windows.Window]:
    """The windows in all settings."""
    switches = {"SGLANG_HANDOFF_DIGEST": "count", digest_switch.SWITCH: SWITCH_FILE}
    with windows.steady(given.patched.resolve().parent, switches) as steady:
        words = steady.board(SWITCH_FILE, digest_switch.WORDS)
        meters: dict[str, windows.Meter] = {}
        for server in (steady.pair.prefill, steady.pair.decode):
            end = server.process.name
            meters[end] = windows.processor_time(schedulers(server))
            meters[f"{end}, digests"] = partial(_seconds, words, ENDS[end])
        turns = {name: partial(words.__setitem__, PER_CENT, to) for name, to in SETTINGS.items()}
        return asyncio.run(steady.windows(turns, meters, given.rounds, given.window))


def _seconds(words: memoryview[int], of: int) -> float:
    return words[of] / 1e9


def rows(found: Sequence[windows.Window]) -> list[dict[str, Any]]:
    """The windows' rows, with the share of each end's processor time that went into digests."""
    return [
        row | {"shares": {end: row["spent"][f"{end}, digests"] / row["spent"][end] for end in ENDS}}
        for row in windows.rows(found)
    ]


def main() -> int:
    given = windows.arguments(__doc__ or "", ROUNDS)
    found = rows(measure(given))
    shares = {
        f"digests, of {end}": [f"{100 * row['shares'][end]:.4f} %" for row in found] for end in ENDS
    }
    kept = windows.report(given, found, shares, PROMISED)
    counted = [max(row["shares"].values()) <= PROMISED.get(row["setting"], 1.0) for row in found]
    return int(not (kept and all(counted)))


if __name__ == "__main__":
    sys.exit(main())
