# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of `seam`."""

from __future__ import annotations

from pathlib import Path

import pytest
from workshop import Workshop


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """A small series with its own wheels; commands run in its repository."""
    built = Workshop(tmp_path)
    monkeypatch.setenv("SEAM_CACHE", str(built.cache))
    monkeypatch.chdir(built.root)
    return built
