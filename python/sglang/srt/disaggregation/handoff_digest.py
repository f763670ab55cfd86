# SPDX-License-Identifier: Apache-2.0
"""Whether a metadata row is, when decode reads it, what prefill put into it.

Prefill signs a row when it fills it: a checksum per part, in spare words of the row itself. Decode
compares at commit, and once more when the prebuilt batch is built, over the memory that is read.

    row of `MetadataBuffers.bootstrap_room`, 16 x 32 bits
    [0:4]    room, and the prompt's signature (pair_agreement.py)
    [4]      `MARK` << 16 | which parts are signed, a bit each; 0 from an end that does not sign
    [5:14]   CRC-32 of each part, in the order of `PARTS`
    [14:16]  spare

Off by default; SGLANG_HANDOFF_DIGEST says what a mismatch does, SGLANG_HANDOFF_DIGEST_RATE which
share of the requests is checked. A row is the same share's on both ends and on every rank, for it
is chosen by its room. A rate may differ between the ends: decode passes over what is not signed.
"""

from __future__ import annotations

import functools
import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from sglang.srt.disaggregation.metadata_slots import Slot
    from sglang.srt.disaggregation.utils import MetadataBuffers
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])

POLICY = "SGLANG_HANDOFF_DIGEST"
RATE = "SGLANG_HANDOFF_DIGEST_RATE"

MARK = 0xD167
MARK_BITS = 16
HEAD, FIRST = 4, 5
"""Words of a row: the mark with the signed parts, and the checksum of the first part."""
GOLDEN = 0x9E37_79B9_7F4A_7C15
"""Spreads rooms that follow each other evenly over 64 bits (Knuth's multiplicative hash)."""

PARTS: tuple[tuple[str, ...], ...] = (
    ("output_ids",),
    ("cached_tokens",),
    ("output_token_logprobs_val", "output_token_logprobs_idx"),
    ("output_top_logprobs_val", "output_top_logprobs_idx"),
    (
        "output_token_sampling_mask_len",
        "output_token_sampling_mask_idx",
        "output_token_sampling_logprobs",
    ),
    ("output_topk_p",),
    ("output_topk_index",),
    ("output_hidden_states",),
    ("output_dsa_topk_indices",),
)
"""Fields of the buffers, by part. Both ends count on the order: a new part goes to the end."""
TOKENS, LOGPROBS, SAMPLING, DRAFT = (0, 1), (2, 3), (4,), (5, 6, 7, 8)
"""Parts that are written together; a request's own parts are known when its row is filled."""


class Policy(Enum):
    """What a mismatch does, beside being counted."""

    OFF = "off"
    COUNT = "count"
    LOG = "log"
    ABORT = "abort"


class Stage(Enum):
    """When a row is looked at."""

    FILL = "fill"
    COMMIT = "commit"
    CONSUME = "consume"


class Verdict(Enum):
    """What a look at a row gave."""

    SIGNED = "signed"
    MATCH = "match"
    MISMATCH = "mismatch"
    UNSIGNED = "unsigned"


@dataclass(frozen=True)
class Mismatch:
    """One part of a row that is not what prefill signed; `sent` and `found` are checksums, or
    rooms where the row holds another request's."""

    stage: Stage
    field: str
    rid: str
    room: int
    row: int
    generation: int
    holder: str
    sent: int
    found: int

    def __str__(self) -> str:
        return (
            f"handoff digest mismatch at {self.stage.value}: {self.field} of request {self.rid!r} "
            f"(room {self.room}) in metadata row {self.row}, leased as generation "
            f"{self.generation} and held by {self.holder}: prefill sent {self.sent:08x}, the row "
            f"holds {self.found:08x}"
        )


@dataclass(slots=True)
class Receipt:
    """What a committed row was signed with, kept until the row is read."""

    signed: dict[int, int]
    """Checksum by part."""
    mismatches: list[Mismatch] = field(default_factory=list)


class Digests:
    """The checksums of one process's metadata rows, and how the looks at them went.

    `tally` counts looks by stage and verdict, one per request and stage. `mismatches` counts parts
    by stage and name.
    """

    def __init__(self, buffers: MetadataBuffers, policy: Policy, rate: float) -> None:
        self.policy = policy
        self.tally: Counter[tuple[Stage, Verdict]] = Counter()
        self.mismatches: Counter[tuple[Stage, str]] = Counter()
        self._threshold = round(rate * 2**32)
        self._words: Any = _bytes(buffers.bootstrap_room).view(np.uint32)
        self._fields: tuple[tuple[Any, ...], ...] = tuple(
            tuple(
                _bytes(getattr(buffers, name))
                for name in names
                if getattr(buffers, name, None) is not None
            )
            for names in PARTS
        )
        self._told_unsigned = False

    def samples(self, room: int | None) -> bool:
        """Whether the request in `room` is checked."""
        return ((room or 0) * GOLDEN & (1 << 64) - 1) >> 32 < self._threshold

    def sign(self, req: Req) -> None:
        """Prefill: put the checksums of what was put into the row of `req` beside its room."""
        row = req.metadata_buffer_index
        words = self._words[row]
        words[HEAD] = 0
        if not self.samples(req.bootstrap_room):
            return
        signed = 0
        for part in self._put(req):
            words[FIRST + part] = self._checksum(part, row)
            signed |= 1 << part
        words[HEAD] = MARK << MARK_BITS | signed
        self.tally[Stage.FILL, Verdict.SIGNED] += 1

    def commit(self, req: Req, slot: Slot) -> None:
        """Decode: compare the row that was just received with its signature."""
        if not self.samples(req.bootstrap_room):
            return
        words = self._words[slot.index]
        head = int(words[HEAD])
        if head >> MARK_BITS != MARK:
            self._note_unsigned(req)
            return
        parts = [part for part in range(len(PARTS)) if head >> part & 1 and self._fields[part]]
        receipt = Receipt({part: int(words[FIRST + part]) for part in parts})
        req.handoff_receipt = receipt
        self._compare(Stage.COMMIT, req, slot, receipt, parts)

    def consume(self, req: Req) -> list[Mismatch]:
        """Decode: compare the draft state of `req` again, as it is about to be read.

        Returns all mismatches of the request, those of its commit included. A request without a row
        (it resumes, or nothing drafts from the row) has nothing left to compare.
        """
        receipt: Receipt | None = getattr(req, "handoff_receipt", None)
        if receipt is None:
            return []
        req.handoff_receipt = None
        slot: Slot | None = getattr(req, "metadata_slot", None)
        if slot is not None:
            drafted = [part for part in DRAFT if part in receipt.signed]
            self._compare(Stage.CONSUME, req, slot, receipt, drafted)
        return receipt.mismatches

    def counts(self) -> dict[str, int]:
        """The tally, for a reader."""
        return {f"{stage.value} {verdict.value}": n for (stage, verdict), n in self.tally.items()}

    def _compare(
        self, stage: Stage, req: Req, slot: Slot, receipt: Receipt, parts: list[int]
    ) -> None:
        found = list(self._differences(req, slot, receipt, parts))
        self.tally[stage, Verdict.MISMATCH if found else Verdict.MATCH] += 1
        holder = slot.pool.holders[slot.index]
        held_by = f"{holder.owner!r} (generation {holder.generation})" if holder else "nobody"
        for name, sent, there in found:
            mismatch = Mismatch(
                stage,
                name,
                req.rid,
                req.bootstrap_room or 0,
                slot.index,
                slot.generation,
                held_by,
                sent,
                there,
            )
            receipt.mismatches.append(mismatch)
            self.mismatches[stage, name] += 1
            if self.policy is not Policy.COUNT:
                logger.error("%s", mismatch)

    def _differences(
        self, req: Req, slot: Slot, receipt: Receipt, parts: list[int]
    ) -> Iterator[tuple[str, int, int]]:
        room = int(self._words[slot.index, :2].view(np.uint64)[0])
        if room not in (0, req.bootstrap_room):  # SGLang clears it after the commit, from 0.5.13 on
            yield "bootstrap_room", req.bootstrap_room or 0, room
        for part in parts:
            found = self._checksum(part, slot.index)
            if found != receipt.signed[part]:
                yield PARTS[part][0], receipt.signed[part], found

    def _put(self, req: Any) -> Iterator[int]:
        """The parts that `MetadataBuffers.set_buf` writes for this request."""
        yield from TOKENS
        if req.return_logprob:
            yield from LOGPROBS
        if getattr(req, "return_sampling_mask", False):
            yield from SAMPLING
        if req.hidden_states_tensor is not None:
            yield from (part for part in DRAFT if self._fields[part])

    def _checksum(self, part: int, row: int) -> int:
        checksum = 0
        for rows in self._fields[part]:
            checksum = zlib.crc32(rows[row], checksum)
        return checksum

    def _note_unsigned(self, req: Req) -> None:
        from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

        if req.bootstrap_host == FAKE_BOOTSTRAP_HOST:  # a health probe has no other end
            return
        self.tally[Stage.COMMIT, Verdict.UNSIGNED] += 1
        if not self._told_unsigned:
            self._told_unsigned = True
            logger.warning(
                "Request %r came with an unsigned metadata row: its prefill server does not sign "
                "(%s is off there, or it has no such patch) or samples less. Such rows are not "
                "checked.",
                req.rid,
                POLICY,
            )


def attached(init: Method) -> Method:
    """Decorates MetadataBuffers.__init__: the buffers know their digests, None when they are off.

    Raises:
        ValueError: a setting in the environment is not one.
    """

    @functools.wraps(init)
    def attach(buffers: MetadataBuffers, *args: Any, **kwargs: Any) -> None:
        init(buffers, *args, **kwargs)
        buffers.digests = _digests(buffers)

    return attach  # type: ignore[return-value]


def signed(set_buf: Method) -> Method:
    """Decorates MetadataBuffers.set_buf: a row is signed when all of it is there."""

    @functools.wraps(set_buf)
    def fill(buffers: MetadataBuffers, req: Req) -> None:
        set_buf(buffers, req)
        digests = of(buffers)
        if digests is not None:
            digests.sign(req)

    return fill  # type: ignore[return-value]


def commit(buffers: MetadataBuffers, req: Req) -> None:
    """Compare the row of `req`, which is being committed, if rows are compared."""
    digests = of(buffers)
    if digests is not None:
        digests.commit(req, req.metadata_slot)


def consume(batch: ScheduleBatch) -> None:
    """Compare the rows that a prebuilt batch is about to read, if rows are compared.

    With `Policy.ABORT` the ranks agree on what is aborted: a request whose row is wrong on one of
    them is wrong. It ends with the prebuilt batch, before its first step.
    """
    pool: Any = getattr(batch.req_to_token_pool, "metadata_slots", None)
    digests = None if pool is None or pool.buffers is None else of(pool.buffers)
    if digests is None:
        return
    found = [digests.consume(req) for req in batch.reqs]
    if digests.policy is not Policy.ABORT:
        return
    if not any(digests.samples(req.bootstrap_room) for req in batch.reqs):
        return
    wrong = _on_any_rank([bool(mismatches) for mismatches in found], pool.group)
    for req, mismatches, is_wrong in zip(batch.reqs, found, wrong, strict=True):
        if is_wrong:
            _abort(req, mismatches)


def add_counts(get_internal_state: Method) -> Method:
    """Decorates Scheduler.get_internal_state: the reply carries the tally."""

    @functools.wraps(get_internal_state)
    def with_counts(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        reply = get_internal_state(scheduler, *args, **kwargs)
        digests = of(getattr(scheduler, "disagg_metadata_buffers", None))
        if digests is not None:
            reply.internal_state["handoff_digests"] = digests.counts()
        return reply

    return with_counts  # type: ignore[return-value]


def of(buffers: MetadataBuffers | None) -> Digests | None:
    """The digests of these buffers, None when rows are not checked."""
    return getattr(buffers, "digests", None)


def _digests(buffers: MetadataBuffers) -> Digests | None:
    policy, rate = _settings()
    if policy is Policy.OFF or not rate:
        return None
    device = buffers.bootstrap_room.device.type
    if device != "cpu":
        logger.warning(
            "%s is set, but the metadata buffers are on %s: their rows are not checked, for a look "
            "at them would wait for the device.",
            POLICY,
            device,
        )
        return None
    logger.info("Handoff digests: %s, %.4g of the requests.", policy.value, rate)
    return Digests(buffers, policy, rate)


def _settings() -> tuple[Policy, float]:
    """What a mismatch does, and the share of requests that is checked, from 0 to 1."""
    policy = os.environ.get(POLICY, "").strip().lower() or Policy.OFF.value
    if policy not in {known.value for known in Policy}:
        known = ", ".join(known.value for known in Policy)
        raise ValueError(f"{POLICY}={policy}: give one of {known}")
    text = os.environ.get(RATE, "").strip() or "1"
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise ValueError(f"{RATE}={text}: give a share from 0 to 1, such as 0.01")
    return Policy(policy), rate


def _bytes(rows: torch.Tensor) -> Any:
    """The memory of `rows`, `[rows, bytes of a row]`; numpy knows neither bfloat16 nor float8."""
    return rows.view(torch.uint8).numpy()


def _on_any_rank(flags: list[bool], group: Any) -> list[bool]:
    """`flags`, each true where it is true on any rank of `group`."""
    dist = torch.distributed
    if group is None or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return flags
    agreed = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in agreed.tolist()]


def _abort(req: Req, mismatches: list[Mismatch]) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    what = "; ".join(map(str, mismatches)) or "handoff digest mismatch on another rank"
    req.to_finish = FINISH_ABORT(what, HTTPStatus.INTERNAL_SERVER_ERROR)
