# SPDX-License-Identifier: Apache-2.0
"""The traffic of `pressure`; decode backs retracted requests up in its host pool."""

from __future__ import annotations

from dataclasses import replace

from pdlab.scenarios import pressure
from pdlab.settings import HOST_COPIES

# Several times the device pool, for as many requests as may be retracted at once.
FLAGS = (
    *("--disaggregation-decode-retraction-backup", "host_pool"),
    *("--hicache-ratio", "16", *HOST_COPIES),
)

SCENARIO = replace(
    pressure.SCENARIO,
    name="host-pool",
    about="KV pressure on decode, backups in the host pool",
    settings=replace(pressure.SCENARIO.settings, decode_flags=FLAGS),
)
