# SPDX-License-Identifier: Apache-2.0
"""What the lab's tests share: a fake tree, a model that is only a description, a clean end."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from leftovers import MARK, marked


@pytest.fixture
def fake_tree() -> Path:
    """A directory that is a tree as far as the lab looks, with servers that cost nothing."""
    return Path(__file__).parent / "fake_tree"


@pytest.fixture
def fake_model(tmp_path: Path) -> Path:
    """A model path without weights."""
    path = tmp_path / "model"
    path.mkdir()
    config = {"vocab_size": 512, "max_position_embeddings": 1024}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test when a process that it started, however deep, is still there."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield
    assert marked(mark) == []
