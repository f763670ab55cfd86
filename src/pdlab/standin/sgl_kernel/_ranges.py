# SPDX-License-Identifier: Apache-2.0
"""Ranges of different lengths as flat index tensors."""

import torch
from torch import Tensor


def ranges(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Which range and which position, [total] each, of all elements of [start[i], end[i])."""
    lengths = (end - start).long()
    which = torch.arange(len(lengths)).repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    return which, torch.arange(len(which)) + (start.long() - first)[which]
