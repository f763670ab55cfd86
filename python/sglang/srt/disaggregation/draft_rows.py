# SPDX-License-Identifier: Apache-2.0
"""Draft state read where it landed: one metadata row at commit, a batch of rows when prebuilt."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.disaggregation import metadata_slots

if TYPE_CHECKING:
    from sglang.srt.disaggregation.utils import MetadataBuffers
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

GetBuf = Callable[["MetadataBuffers", int], tuple[Any, ...]]
Reader = Callable[[int], Any]

# Fields of the buffers that outlive the commit, in a row the request owns.
OUTLIVING = (
    "output_topk_p",
    "output_topk_index",
    "output_hidden_states",
    "output_dsa_topk_indices",
)
# The commit keeps these without copying them (0.5.20 and later), and no request owns them.
SAMPLING_MASK = "output_token_sampling"


def read_in_place(get_buf: GetBuf) -> GetBuf:
    """Decorates MetadataBuffers.get_buf: the same fields in the same order, none of them cloned.

    Draft fields are views, `[row]`, valid as long as the row is held. Scalars are numpy rows over
    the same memory where the buffer is on the host: the commit copies them with `.item()` and
    `.tolist()`, which both kinds have. Which fields SGLang returns, and in which order, is learnt
    from its own get_buf, once per buffer.
    """

    @functools.wraps(get_buf)
    def in_place(buffers: MetadataBuffers, idx: int) -> tuple[Any, ...]:
        readers: tuple[Reader, ...] | None = buffers.__dict__.get("_row_readers")
        if readers is None:
            names = get_buf(_FieldNames(buffers), 0)
            readers = buffers._row_readers = tuple(_reader(buffers, name) for name in names)
        return tuple([read(idx) for read in readers])

    return in_place


class _FieldNames:
    """Stands in for the buffers while get_buf runs: a row of a tensor field is the field's name."""

    def __init__(self, buffers: MetadataBuffers) -> None:
        self._buffers = buffers

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._buffers, name)
        return _FieldName(name) if isinstance(value, torch.Tensor) else value


class _FieldName(str):
    def __getitem__(self, _: Any) -> _FieldName:
        return self

    def clone(self) -> _FieldName:
        return self


def _reader(buffers: MetadataBuffers, name: Any) -> Reader:
    if not isinstance(name, _FieldName):
        return lambda _: name
    field: torch.Tensor = getattr(buffers, str(name))
    if name.startswith(SAMPLING_MASK):
        return lambda row: field[row].clone()
    stays_tensor = name in OUTLIVING or field.device.type != "cpu"
    read: Reader = field.__getitem__ if stays_tensor else field.numpy().__getitem__
    return read


@dataclass(slots=True)
class PrebuiltRows:
    """The metadata rows of a prebuilt batch, in batch order.

    `index` is `[batch]`, int64, on the buffers' device; 0 stands where a request owns no row.
    """

    buffers: MetadataBuffers
    reqs: list[Req]
    index: torch.Tensor
    rowless: list[int]
    device: torch.device


def take(batch: ScheduleBatch) -> PrebuiltRows:
    """Look up the rows of `batch` and mark them as read.

    Raises:
        SlotError: a request shows a row that is not its own any more.
    """
    pool = metadata_slots.pool_beside(batch)
    assert pool is not None and pool.buffers is not None, "the decode queues are not built yet"
    rows, rowless = [], []
    for i, req in enumerate(batch.reqs):
        slot = getattr(req, "metadata_slot", None)
        rows.append(0 if slot is None else slot.read())
        if slot is None:
            rowless.append(i)
    index = torch.tensor(rows, dtype=torch.int64, device=pool.buffers.output_topk_p.device)
    return PrebuiltRows(pool.buffers, batch.reqs, index, rowless, torch.device(batch.device))


def topk_p(rows: PrebuiltRows, width: int) -> torch.Tensor:
    """Candidate probabilities, `[batch, width]` float32; zero for a request without draft state."""
    neutral = torch.zeros(width) if rows.rowless else None
    return _gather(rows, rows.buffers.output_topk_p[:, :width], "output_topk_p", neutral)


def topk_index(rows: PrebuiltRows, width: int) -> torch.Tensor:
    """Candidate tokens, `[batch, width]` int64.

    Distinct ones for a request without draft state: equal siblings would count twice in the tree.
    """
    neutral = torch.arange(width) if rows.rowless else None
    return _gather(rows, rows.buffers.output_topk_index[:, :width], "output_topk_index", neutral)


def hidden_states(rows: PrebuiltRows) -> torch.Tensor:
    """Hidden states, `[batch, hidden]` in the buffer's dtype; zero without draft state."""
    field = rows.buffers.output_hidden_states
    neutral = torch.zeros(field.shape[1], dtype=field.dtype) if rows.rowless else None
    return _gather(rows, field, "hidden_states_tensor", neutral)


def dsa_topk_indices(rows: PrebuiltRows) -> torch.Tensor:
    """DSA seed rows, `[batch, seed]` int32; -1 where there is no draft state."""
    field = rows.buffers.output_dsa_topk_indices
    neutral = torch.full((field.shape[1],), -1, dtype=field.dtype) if rows.rowless else None
    return _gather(rows, field, "output_dsa_topk_indices", neutral)


def _gather(
    rows: PrebuiltRows, field: torch.Tensor, attribute: str, neutral: torch.Tensor | None
) -> torch.Tensor:
    """One operation for all rows of `field`, straight into pinned memory when it goes to CUDA.

    A request without a row brings its own state in `attribute`, or takes `neutral`.
    """
    staging = None
    if rows.device.type == "cuda" and field.device.type == "cpu":
        shape = (len(rows.reqs), field.shape[1])
        staging = torch.empty(shape, dtype=field.dtype, pin_memory=True)
    staged = torch.index_select(field, 0, rows.index, out=staging)
    for i in rows.rowless:
        own = getattr(rows.reqs[i], attribute, None)
        staged[i].copy_(neutral if own is None else own[: field.shape[1]])
    return staged.to(rows.device, non_blocking=staging is not None)
