# SPDX-License-Identifier: Apache-2.0
"""The scenarios by name: one module each, with a SCENARIO in it."""

from __future__ import annotations

from collections.abc import Sequence

from pdlab.errors import LabError
from pdlab.scenarios import (
    aborts,
    burst,
    crowd,
    dead_prefill,
    faults,
    health,
    hicache,
    hicache_decode,
    host_pool,
    hostile,
    layers,
    parity,
    prefix,
    pressure,
    probes,
    republish,
    soak,
)
from pdlab.scenarios.model import Scenario

SCENARIOS = {
    module.SCENARIO.name: module.SCENARIO
    for module in (
        parity,
        burst,
        prefix,
        pressure,
        republish,
        layers,
        hicache,
        hicache_decode,
        host_pool,
        health,
        probes,
        dead_prefill,
        crowd,
        aborts,
        soak,
        hostile,
        faults,
    )
}


def choose(names: Sequence[str]) -> list[Scenario]:
    """The scenarios named, all when none is; LabError for a name that none has."""
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise LabError(f"no scenario {', '.join(unknown)}: there are {', '.join(SCENARIOS)}")
    return [SCENARIOS[name] for name in dict.fromkeys(names or SCENARIOS)]
