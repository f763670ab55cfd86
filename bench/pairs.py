# SPDX-License-Identifier: Apache-2.0
"""Pairs of servers that are up together, for the benchmarks that measure some of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pdlab.pair import Launcher, Pair
from pdlab.progress import Progress
from pdlab.runner import Runner
from pdlab.scenarios import burst
from pdlab.settings import Device, Settings
from pdlab.traffic import Request
from pdlab.trees import Tree

START_LIMIT_S = 300.0
NOTHING: Mapping[str, str] = {}


@contextmanager
def running(
    build: Path, served: Sequence[Tree], settings: Settings, more: Mapping[str, str] = NOTHING
) -> Iterator[tuple[list[Pair], Sequence[Request]]]:
    """A pair of each tree, all with `settings`, and the requests of a burst for them.

    `build` has the models below it. `more` is for the environment of all servers.
    """
    with (
        tempfile.TemporaryDirectory(prefix="pdlab-logs-") as logs,
        Launcher(Device.CPU, START_LIMIT_S, Path(logs), more=more) as launcher,
        ExitStack() as up,
    ):
        model = Runner(launcher, Progress(), build / "fixtures").model_of(settings)
        [wave] = burst.SCENARIO.waves(model.vocab)
        pairs = [up.enter_context(launcher.pair(tree, settings, model)) for tree in served]
        yield pairs, wave.requests
