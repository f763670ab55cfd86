# SPDX-License-Identifier: Apache-2.0
"""The fixture's draft once per step: each step's own runner and KV pool, the same weights."""

from typing import Any

from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle as _Draft


class LlamaForCausalLMEagle(_Draft):  # type: ignore[misc]
    """A draft of several layers is loaded layer by layer; this one has the same for all."""

    def __init__(self, *args: Any, draft_model_idx: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


EntryClass = LlamaForCausalLMEagle
