# SPDX-License-Identifier: Apache-2.0
"""What a signed and checked metadata row costs a request, on each end, beside an unsigned one.

    bench/handoff_digest.py --patched build/0.5.23/python [--json FILE]

Processor time of one process, on SGLang's real buffers with this series' decorators; a request that
is not sampled and one whose digests are off are timed too. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import frame
from frame import microseconds

HIDDEN = (2048, 7168, 3 * 7168)  # a small model, one layer's state, and the three of EAGLE-3
ROWS, TOPK = 64, 8
TURNS = 30
SECONDS_PER_TURN = 0.02
MODES = {"off": ("off", "1"), "not sampled": ("count", "0.000000001"), "checked": ("count", "1")}
CEILINGS_US = {"off": 1.5, "not sampled": 5.0}
"""What a request may pay on each end while its row is not checked, in microseconds."""


class Side:
    """Both ends of a row, under one setting."""

    def __init__(self, hidden: int, policy: str, rate: str) -> None:
        import torch
        from sglang.srt.disaggregation import handoff_digest, metadata_slots, utils

        os.environ[handoff_digest.POLICY], os.environ[handoff_digest.RATE] = policy, rate
        self.module = handoff_digest
        self.buffers = utils.MetadataBuffers(ROWS, hidden, torch.bfloat16, 16)
        self.set_buf = utils.MetadataBuffers.set_buf.__wrapped__
        self.sign = handoff_digest.signed(lambda *_: None)
        self.pool = metadata_slots.SlotPool(ROWS)
        self.pool.buffers = self.buffers
        self.reqs = [self._request(torch, hidden, row) for row in range(ROWS)]
        self.batch = SimpleNamespace(
            reqs=self.reqs, req_to_token_pool=SimpleNamespace(metadata_slots=self.pool)
        )

    def _request(self, torch: Any, hidden: int, row: int) -> SimpleNamespace:
        return SimpleNamespace(
            rid=f"r{row}",
            bootstrap_room=row + 1,
            bootstrap_host="127.0.0.1",
            metadata_buffer_index=row,
            metadata_slot=self.pool.lease(f"r{row}"),
            origin_input_ids=[1, 2],
            output_ids=[7],
            cached_tokens=0,
            cached_tokens_device=0,
            cached_tokens_host=0,
            cached_tokens_storage=0,
            get_mm_token_counts=lambda: (0, 0, 0),
            return_logprob=False,
            return_sampling_mask=False,
            multimodal_inputs=None,
            output_topk_p=torch.rand(TOPK),
            output_topk_index=torch.arange(TOPK),
            hidden_states_tensor=torch.rand(hidden).bfloat16(),
            output_dsa_topk_indices=None,
        )

    def fill(self) -> None:
        for req in self.reqs:
            self.set_buf(self.buffers, req)

    def prefill(self) -> None:
        for req in self.reqs:
            self.sign(self.buffers, req)

    def decode(self) -> None:
        for req in self.reqs:
            self.module.commit(self.buffers, req)
        self.module.consume(self.batch)


def measure() -> list[dict[str, Any]]:
    """Each size and setting: medians over turns in which the settings alternate."""
    rows = []
    for hidden in HIDDEN:
        sides = {name: Side(hidden, *setting) for name, setting in MODES.items()}
        times: dict[tuple[str, str], list[float]] = {}
        for side in sides.values():
            side.prefill()
        for turn in range(TURNS):
            for name in list(sides) if turn % 2 else list(sides)[::-1]:
                side = sides[name]
                for call in (side.fill, side.prefill, side.decode):
                    took = microseconds(call, SECONDS_PER_TURN) / ROWS
                    times.setdefault((name, call.__name__), []).append(took)
        for name in sides:
            row: dict[str, Any] = {"hidden": hidden, "digests": name}
            for call in ("prefill", "decode", "fill"):
                row[f"{call}_us"] = round(statistics.median(times[name, call]), 2)
                quartiles = statistics.quantiles(times[name, call])[::2]
                row[f"{call}_quartiles_us"] = [round(each, 2) for each in quartiles]
            rows.append(row)
    return rows


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Requests that pay although their row is not checked."""
    return [
        f"hidden {row['hidden']}, {row['digests']}: {row[f'{end}_us']} us on {end}, at most "
        f"{CEILINGS_US[row['digests']]} promised"
        for row in rows
        for end in ("prefill", "decode")
        if row["digests"] in CEILINGS_US and row[f"{end}_us"] > CEILINGS_US[row["digests"]]
    ]


def table(rows: list[dict[str, Any]]) -> str:
    head = f"{'hidden':>7}  {'digests':12}{'prefill':>11}{'decode':>11}{'filling a row':>16}"
    return "\n".join(
        [
            head,
            *(
                f"{row['hidden']:>7}  {row['digests']:12}{row['prefill_us']:>8} us"
                f"{row['decode_us']:>8} us{row['fill_us']:>13} us"
                for row in rows
            ),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--patched", type=Path, help="python folder of a built tree")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        answers, sys.stdout = sys.stdout, sys.stderr
        print(json.dumps(measure()), file=answers)
        return 0
    if not given.patched:
        parser.error("--patched is needed: seam tree build/0.5.23, then build/0.5.23/python")
    done = subprocess.run(
        [sys.executable, __file__, "--measure"],
        env=frame.environment(given.patched),
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        return done.returncode
    rows = json.loads(done.stdout)
    print(table(rows))
    frame.write(given.json, rows)
    for miss in missed(rows):
        print(miss, file=sys.stderr)
    return 1 if missed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
