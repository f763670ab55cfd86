# SPDX-License-Identifier: Apache-2.0
"""A pair outlives the loss of a server and of the link between its two ends, on real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from built import BUILD, START_LIMIT_S, TREE, on_servers

from pdlab import trees
from pdlab.faults import FAULTS, Fault, Ordeal
from pdlab.pair import Launcher
from pdlab.progress import Progress
from pdlab.runner import Runner
from pdlab.scenarios import faults
from pdlab.settings import Device
from pdlab.siege import Reference
from pdlab.traffic import send_all

CALM, BURST = 4, 40
STRUCK = [fault for fault in FAULTS if fault.name in ("decode killed", "link cut")]
pytestmark = on_servers


@pytest.fixture(scope="module")
def ordeal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ordeal, Reference]]:
    """Faults to come, and what an aggregated server answers to the same requests."""
    tree = trees.existing(TREE, trees.PATCHED)
    progress = Progress()
    with Launcher(Device.CPU, START_LIMIT_S, tmp_path_factory.mktemp("logs")) as launcher:
        model = Runner(launcher, progress, BUILD / "fixtures").model_of(faults.SETTINGS)
        calm, burst = faults.calm(model.vocab)[:CALM], faults.burst(model.vocab)[:BURST]
        with launcher.aggregated(tree, faults.SETTINGS.reference(), model) as server:
            answers = asyncio.run(send_all(server.url, [*calm, *burst]))
        reference = {
            request.key: outcome.tokens
            for request, outcome in zip([*calm, *burst], answers, strict=True)
        }
        yield (
            Ordeal(launcher, tree, faults.SETTINGS, model, calm, burst, progress.say),
            reference,
        )


@pytest.mark.parametrize("fault", STRUCK, ids=lambda fault: fault.name)
def test_nobody_is_left_without_a_word_and_nothing_is_kept(
    ordeal: tuple[Ordeal, Reference], fault: Fault
) -> None:
    pair, reference = ordeal
    [damage] = pair.run([fault])
    broken = [figure for figure in faults.figures([damage], reference) if not figure.holds]
    assert broken == [], damage.left
    assert len(damage.afterwards) == CALM
    assert damage.failed, "the fault did no harm, so that nothing was shown"
