# SPDX-License-Identifier: Apache-2.0
"""A few numbers that servers share with whoever measures them."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

WORD_BYTES = 8


class Board:
    """`words`: signed 64-bit numbers in a file, 0 at first; made by whoever comes first."""

    def __init__(self, path: Path, words: int) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, WORD_BYTES * words)
        self.words = memoryview(mmap.mmap(file, WORD_BYTES * words)).cast("q")
        os.close(file)
