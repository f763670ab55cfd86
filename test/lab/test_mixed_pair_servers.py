# SPDX-License-Identifier: Apache-2.0
"""A fleet can be upgraded one side at a time: a patched server works with a stock one."""

from __future__ import annotations

from pathlib import Path

from built import BUILD, START_LIMIT_S, TREE, on_servers

from pdlab import trees
from pdlab.pair import Launcher
from pdlab.progress import Progress
from pdlab.runner import Runner
from pdlab.scenarios import choose
from pdlab.settings import Device, Role

pytestmark = on_servers


def test_a_half_upgraded_pair_gives_the_tokens_of_an_aggregated_server(tmp_path: Path) -> None:
    patched = trees.existing(TREE, trees.PATCHED)
    stock = trees.stock(patched.release, BUILD, Device.CPU)
    with Launcher(Device.CPU, START_LIMIT_S, tmp_path) as launcher:
        runner = Runner(launcher, Progress(), BUILD / "fixtures")
        for role in (Role.PREFILL, Role.DECODE):
            runner.others = {role: stock}
            [run] = runner.run([patched], choose(["parity"]))
            assert run.broken == [], f"{role.value} is stock"
            [log] = tmp_path.glob(f"*-{stock.label}-{role.value}.log")
            assert log.stat().st_size
