# SPDX-License-Identifier: Apache-2.0
"""What prefill/decode serving takes for granted of a GPU, asked instead of assumed.

Every answer is the stock one on any device but the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

Method = TypeVar("Method", bound=Callable[..., object])


def on_cpu() -> bool:
    """Whether this process serves on the CPU engine (the switch SGLang itself goes by)."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"


def takes_pinned_indices(sender: object, kv_indices: torch.Tensor) -> bool:
    """Whether page indices go to `sender` through pinned memory and a CUDA event.

    `kv_indices`: int [tokens] on the serving device. Indices that already are in host memory have
    nothing to wait for, and there is no CUDA event to record (0.5.23, disaggregation/prefill.py).
    """
    wanted = getattr(sender, "supports_host_tensor_indices", False)
    return wanted and kv_indices.device.type != "cpu"


def has_streams(overlaps: bool) -> bool:
    """Whether batches that overlap run on streams of their own, whose events a send waits for.

    Without a draft a CPU server overlaps batches too; its one stream is the thread that sends
    (0.5.16 and later, disaggregation/prefill.py).
    """
    return overlaps and not on_cpu()


def host_pool_works(supported: bool) -> bool:
    """Whether a retraction is backed up in the host pool when no flag says so.

    Not on the CPU, where that pool needs the I/O backend to be named. `supported`: what the KV
    pool's kind allows (0.5.18 and later, mem_cache/kv_cache_builder.py).
    """
    return supported and not on_cpu()


def pins_host_memory(wanted: bool) -> bool:
    """Whether the memory of a host pool is pinned: where the pool serves a GPU.

    That goes for its buffer and for the pages that are read from storage.
    """
    return wanted and not on_cpu()


def copies_in_place(method: Method) -> Method:
    """Lend a host pool's module the copy operator that it imports where there is a GPU alone.

    Decorates a method of the pool; one is enough, for the name is its module's, and an operator
    that was imported stays. It serves the I/O backend ``direct`` with the layout ``layer_first``;
    the ``kernel`` backend is CUDA code.
    """
    names = getattr(method, "__globals__", {})
    names.setdefault("transfer_kv_direct", transfer_kv_direct)
    return method


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy rows ``src_indices`` (n,) of each source layer to rows ``dst_indices`` (n,) of its peer.

    Like sgl_kernel's operator of that name it is told ``page_size``, which only makes larger pieces
    possible: indices name every token of a page.
    """
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices].to(dst.dtype)


def wants_pynccl(wanted: bool) -> bool:
    """Whether a rank group gets a PyNccl communicator: never on the CPU, where none can start.

    A CUDA build of torch ships the NCCL library, so its presence says nothing about the device
    (0.5.6 and later, distributed/device_communicators/pynccl.py).
    """
    return wanted and not on_cpu()
