# SPDX-License-Identifier: Apache-2.0
"""State-space and linear attention: no operator has a CPU stand-in."""

from collections.abc import Callable
from typing import NoReturn

from ._missing import missing


def __getattr__(name: str) -> Callable[..., NoReturn]:
    return missing(__name__, name)
