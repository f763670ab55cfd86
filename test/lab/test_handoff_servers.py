# SPDX-License-Identifier: Apache-2.0
"""A metadata row spoiled between commit and reading is caught and named, on real servers."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from built import BUILD, START_LIMIT_S, TREE, on_servers

from pdlab import trees
from pdlab.models import row_fault
from pdlab.pair import Launcher
from pdlab.progress import Progress
from pdlab.runner import Runner
from pdlab.settings import Device, Settings
from pdlab.traffic import random_requests, send_all

REQUESTS, EVERY = 12, 4
pytestmark = on_servers
MISMATCH = re.compile(
    r"handoff digest mismatch at consume: output_hidden_states of request '(?P<rid>\w+)' "
    r"\(room \d+\) in metadata row (?P<row>\d+), leased as generation \d+ and held by '(?P=rid)' "
    r"\(generation \d+\): prefill sent (?P<sent>[0-9a-f]{8}), the row holds (?P<found>[0-9a-f]{8})"
)


def test_spoiled_rows_end_their_requests_by_name_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HANDOFF_DIGEST", "abort")
    monkeypatch.setenv(row_fault.FAULT, f"output_hidden_states:{EVERY}")
    tree = trees.existing(TREE, trees.PATCHED)
    with Launcher(Device.CPU, START_LIMIT_S, tmp_path) as launcher:
        model = Runner(launcher, Progress(), BUILD / "fixtures").model_of(Settings())
        requests = random_requests(21, model.vocab, [40] * REQUESTS, 24)
        with launcher.pair(tree, Settings(), model) as pair:
            outcomes = asyncio.run(send_all(pair.url, requests))
            log = pair.decode.process.log.read_text()
    spoiled = set(re.findall(r"row fault: output_hidden_states of '(\w+)' in row (\d+)", log))
    named = {
        (found["rid"], found["row"])
        for outcome in outcomes
        if outcome.error and (found := MISMATCH.search(outcome.error))
    }
    assert len(spoiled) == REQUESTS // EVERY
    assert named == spoiled
    assert all(found["sent"] != found["found"] for found in MISMATCH.finditer(log))
    assert sum(outcome.ok for outcome in outcomes) == REQUESTS - len(spoiled)
