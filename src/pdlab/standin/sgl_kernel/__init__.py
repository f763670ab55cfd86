# SPDX-License-Identifier: Apache-2.0
"""CPU stand-in for SGLang's compiled `sgl_kernel`: what Llama with EAGLE calls, in plain torch.

SGLang imports these functions from `sgl_kernel` and reaches the two attention operators through
`torch.ops.sgl_kernel`. Signatures follow the callers in SGLang 0.5.23. Run with 0.5.23, 0.5.22 and
0.5.20 under EAGLE and with 0.5.11, which has no EAGLE on a CPU. Older callers differ only in the
attention operators, whose argument lists `attention` registers too: no KV scales up to 0.5.19, no
`is_causal` up to 0.5.18, no `tree_mask` up to 0.5.15.post1, no options at all up to 0.5.12.post1.

`convert_weight_packed` is left out on purpose: SGLang takes its presence for a CPU build with AMX
(`_is_intel_amx_backend_available` in srt/utils/common.py). Without it norms, activations, rotary
embedding, linear layers and the KV store run SGLang's own torch code, on every CPU alike.

Any other name is a placeholder that raises `NotImplementedError` with that name when called, and so
is all of the submodules that SGLang imports on a CPU. An unknown name under `torch.ops.sgl_kernel`
stays an `AttributeError` that says it: SGLang asks with `hasattr` there.
"""

import sys
from collections.abc import Callable
from typing import NoReturn

from . import attention  # noqa: F401  (registers torch.ops.sgl_kernel.*_attention_cpu)
from ._missing import MissingModule, missing
from .draft_tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu
from .kv_cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
)
from .tokens import fill_bonus_tokens_cpu, rotate_input_ids_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

# Imported on a CPU by: srt/mem_cache/memory_pool_host.py up to 0.5.12.post1; the linear attention
# backends; srt/speculative/ngram_worker.py up to 0.5.20.
for _name in ("kvcacheio", "mamba", "speculative"):
    sys.modules[f"{__name__}.{_name}"] = MissingModule(f"{__name__}.{_name}")


def __getattr__(name: str) -> Callable[..., NoReturn]:
    return missing(__name__, name)
