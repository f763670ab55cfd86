# SPDX-License-Identifier: Apache-2.0
"""Finds processes that a test started, by a mark in their environment."""

from __future__ import annotations

import os
from pathlib import Path

MARK = "PDLAB_TEST_MARK"


def marked(mark: str) -> list[str]:
    """Command lines of the processes whose environment carries the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # ended meanwhile, or another user's
    return found
