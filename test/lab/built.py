# SPDX-License-Identifier: Apache-2.0
"""The built tree that tests of real servers serve from; without it they are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

BUILD = Path(__file__).parents[2] / "build"
TREE = BUILD / "0.5.23"
START_LIMIT_S = 300.0
on_servers = [
    pytest.mark.servers,
    pytest.mark.skipif(not TREE.is_dir(), reason="no build/0.5.23: make tree"),
]
