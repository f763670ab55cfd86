# SPDX-License-Identifier: Apache-2.0
"""Commit and prebuilt builder of a decode server on SGLang's real classes.

    bench/metadata_slots.py --patched build/0.5.23/python [--stock PATH] [--json FILE]

No GPU is needed: the figures are host time, and the builder's copies go to the CPU. A commit is per
request, a build per batch; the bytes are those of draft fields that one commit copies.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from frame import Bench, Case, microseconds, run

HIDDEN = (7168, 3 * 7168)  # one layer's hidden state, and the three that EAGLE-3 concatenates
BATCHES = (1, 8, 64)
TOPK = 8
COMMIT, BUILD, COPIED = "commit", "build", "draft bytes copied"


class Side:
    """One tree: a transfer queue with committed and uncommitted entries, ready to be timed."""

    def __init__(self, hidden: int, batch: int) -> None:
        import torch
        from sglang.srt.disaggregation import decode, utils
        from sglang.srt.runtime_context import get_context
        from sglang.srt.speculative import eagle_disaggregation, spec_info

        get_context().override_server_args(
            speculative_algorithm="EAGLE", speculative_eagle_topk=TOPK, device="cpu"
        ).install()

        self.torch = torch
        self.patched = hasattr(utils.MetadataBuffers.get_buf, "__wrapped__")
        self.buffers = utils.MetadataBuffers(2 * batch, hidden, torch.bfloat16, 16)
        self.rows = SimpleNamespace(req_to_token=torch.zeros(2 * batch + 1, 8))
        self.queue = decode.DecodeTransferQueue.__new__(decode.DecodeTransferQueue)
        vars(self.queue).update(
            metadata_buffers=self.buffers,
            req_to_token_pool=self.rows,
            scheduler=SimpleNamespace(
                kv_checksum_computer=None,
                enable_decode_hicache=False,
                batch_result_processor=SimpleNamespace(
                    _maybe_update_reasoning_tokens=lambda *_: None
                ),
            ),
            spec_algorithm=spec_info.SpeculativeAlgorithm.EAGLE,
        )
        self.entries = [self._entry(decode, index) for index in range(batch)]
        self.batch = SimpleNamespace(
            reqs=[entry.req for entry in self.entries],
            device="cpu",
            enable_overlap=False,
            model_config=SimpleNamespace(hf_config=SimpleNamespace(), vocab_size=1000),
            req_to_token_pool=self.rows,
        )
        self.last_tokens = torch.zeros(batch, dtype=torch.int64)
        self.build_draft = eagle_disaggregation.build_eagle_disagg_draft_input
        self.commit()

    def turn(self) -> dict[str, float]:
        return {
            COMMIT: microseconds(self.commit) / len(self.entries),
            BUILD: microseconds(self.build),
            COPIED: float(self.draft_bytes_copied()),
        }

    def _entry(self, decode: Any, index: int) -> Any:
        from array import array

        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        room = index + 1
        address = {"bootstrap_host": "127.0.0.1", "bootstrap_room": room}
        req = Req(f"r{index}", "", array("q", [1, 2]), SamplingParams(), **address)
        entry = decode.DecodeRequest(req=req, kv_receiver=None, metadata_buffer_index=index)
        self.buffers.bootstrap_room[index, 0] = room
        if self.patched:
            from sglang.srt.disaggregation import metadata_slots

            if index == 0:
                slots = metadata_slots.SlotPool(self.buffers.output_ids.shape[0])
                self.queue.req_to_metadata_buffer_idx_allocator = slots
                metadata_slots.bind(self.queue)
            entry.metadata_buffer_index = metadata_slots.allocate(self.queue, entry)
        return entry

    def commit(self) -> None:
        """Commit every entry once."""
        for entry in self.entries:
            entry.kv_receiver = RECEIVER
            entry.req.output_ids = []
            if self.patched:
                self._unhand(entry.req.metadata_slot)
            self.queue._commit_transfer_to_req(entry)

    def _unhand(self, slot: Any) -> None:
        """Back to where a transfer ends; the cost of it counts against the patch."""
        from sglang.srt.disaggregation.metadata_slots import Status

        if slot.status is not Status.TRANSFERRING:
            slot.pool.census[slot.status] -= 1
            slot.pool.census[Status.TRANSFERRING] += 1
            slot.status = Status.TRANSFERRING

    def build(self) -> None:
        """Build the draft input of the whole batch once."""
        self.build_draft(self.batch, self.last_tokens, None)

    def draft_bytes_copied(self) -> int:
        """Bytes of draft fields that one commit copies."""
        fields = ("output_topk_p", "output_topk_index", "output_hidden_states")
        sources = {getattr(self.buffers, name).untyped_storage().data_ptr() for name in fields}
        copied = 0

        class Copies(self.torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                nonlocal copied
                outcome = func(*args, **(kwargs or {}))
                source = args[0]
                if func.overloadpacket.__name__ in ("clone", "_to_copy", "copy_"):
                    source = args[1] if func.overloadpacket.__name__ == "copy_" else source
                    if source.untyped_storage().data_ptr() in sources:
                        copied += source.nbytes
                return outcome

        with Copies():
            self.commit()
        return copied // len(self.entries)


class _Receiver:
    def clear(self) -> None:
        """Nothing to clear."""


RECEIVER = _Receiver()


def ceiling(case: Case, figure: str) -> float | None:
    """What is promised: half of stock's commit, no draft byte, and less to build at 64."""
    if figure == BUILD:
        return 0.7 if case["batch"] == 64 else None
    return {COMMIT: 0.5, COPIED: 0.0}[figure]


BENCH = Bench(
    "Commit and prebuilt builder of a decode server",
    Side,
    [{"hidden": hidden, "batch": batch} for hidden in HIDDEN for batch in BATCHES],
    ceiling,
    {COPIED: "B"},
    work="batch",
)

if __name__ == "__main__":
    sys.exit(run(BENCH, __file__))
