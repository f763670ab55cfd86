# SPDX-License-Identifier: Apache-2.0
"""What a pair of servers runs with, and the command lines that follow from it."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdlab import router
from pdlab.errors import LabError
from pdlab.ports import HOST

# Enough for every scenario; without a number SGLang takes most of the machine's memory.
PLENTY_OF_KV_TOKENS = 65_536
DRAFT_TOKENS = {1: 4}  # by topk; a wider tree verifies more
WIDE_TREE_DRAFT_TOKENS = 8
# Share of one GPU's memory that each of two servers on it may take.
HALF_GPU_MEMORY = 0.4

# One compute thread a server: an idle scheduler spins, and a second thread would wait for it.
# The clipped estimate lets KV pressure build up; with plenty of KV it changes nothing. Triton's
# interpreter runs SGLang's own kernels (allocation of pages among them) without a GPU.
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8",
    "TORCHDYNAMO_DISABLE": "1",
    "TRITON_INTERPRET": "1",
}
GPU_ENVIRONMENT = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"}
# The fixture's draft with the argument that a draft of several layers is loaded with.
MODEL_ENVIRONMENT = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "pdlab.models"}
# A probe fails after this long. The default of 20 s would make every scenario with a server that
# does not answer a long one; whoever sets another limit gets it.
HEALTH_ENVIRONMENT = {"SGLANG_HEALTH_CHECK_TIMEOUT": "3"}
# SGLang's own 5 s are shorter than the router's, which costs requests: see there.
HTTP_ENVIRONMENT = {"SGLANG_TIMEOUT_KEEP_ALIVE": str(2 * router.UNUSED_S)}
TRANSPORT_ENVIRONMENT = {
    "MC_FORCE_TCP": "1",
    "MOONCAKE_PROTOCOL": "tcp",
    "SGLANG_HOST_IP": HOST,
    "HOST_IP": HOST,
}
# The two phase flags are exempt from "no AMX, fall back", and intel_amx is the backend that runs
# EAGLE on a CPU; without AMX its operators are the stand-ins.
CPU_FLAGS = (
    *("--device", "cpu", "--dtype", "float32"),
    *("--attention-backend", "torch_native"),
    *("--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx"),
    *("--cuda-graph-backend-prefill", "disabled", "--cuda-graph-backend-decode", "disabled"),
)
# Host pools are copied by CUDA code unless these say otherwise.
HOST_COPIES = ("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first")


class Device(enum.Enum):
    CPU = "cpu"
    CUDA = "cuda"


class Role(enum.Enum):
    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Model:
    """A target on disk and, when requests are to be drafted, its EAGLE draft."""

    target: Path
    draft: Path | None
    vocab: int
    context: int

    @property
    def has_tokenizer(self) -> bool:
        return any(self.target.glob("tokenizer*"))


def read_model(target: Path, draft: Path | None) -> Model:
    """Look at a model on disk; LabError when it, or its draft, is not one."""
    for path in (target, draft) if draft else (target,):
        if not path.is_dir():
            raise LabError(f"model path {path} does not exist")
        if not (path / "config.json").is_file():
            raise LabError(f"model path {path} holds no config.json")
    file = target / "config.json"
    try:
        config = json.loads(file.read_text())
        config = config.get("text_config", config)
        vocab, context = config["vocab_size"], config["max_position_embeddings"]
    except ValueError as error:
        raise LabError(f"{file} is not JSON: {error}") from error
    except KeyError as missing:
        raise LabError(f"{file} does not say {missing}") from None
    return Model(target.resolve(), draft.resolve() if draft else None, vocab, context)


@dataclass(frozen=True)
class Settings:
    """What a pair runs with, its tree and its device aside. Equal settings can share a pair.

    `layered_draft`: a draft of one layer per step, each with a KV pool of its own.
    """

    fixture: str = "tiny"
    topk: int = 1
    steps: int = 3
    layered_draft: bool = False
    page_size: int = 1
    decode_radix: bool = False
    decode_kv_tokens: int = PLENTY_OF_KV_TOKENS
    decode_reserved_tokens: int | None = None
    prefill_flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def draft_tokens(self) -> int:
        return DRAFT_TOKENS.get(self.topk, WIDE_TREE_DRAFT_TOKENS)

    def reference(self) -> Settings:
        """Settings of the aggregated server whose tokens are right for these: tokens depend on
        the model alone, neither on pages nor on pressure nor on the shape of the draft tree.
        How well its requests draft is what undisturbed ones do, so it has the same kind of draft.
        """
        return Settings(fixture=self.fixture, layered_draft=self.layered_draft)

    def describe(self) -> str:
        """The settings that differ from the default ones, for a reader."""
        default = Settings()
        changed = [
            f"{name.replace('_', ' ')} {_plain(value)}"
            for name, value in vars(self).items()
            if value != getattr(default, name)
        ]
        return ", ".join(changed) or "default settings"


@dataclass(frozen=True)
class Placement:
    """Where a server listens and on which GPU it runs."""

    port: int
    nccl_port: int
    bootstrap_port: int | None = None
    gpu: int = 0
    shares_gpu: bool = False


def server_arguments(
    role: Role, settings: Settings, model: Model, device: Device, place: Placement
) -> tuple[str, ...]:
    """Arguments of `python -m sglang.launch_server`."""
    words: list[str] = [
        *("--model-path", str(model.target), "--host", HOST, "--port", str(place.port)),
        *("--nccl-port", str(place.nccl_port), "--random-seed", "1", "--skip-server-warmup"),
        *("--page-size", str(settings.page_size)),
    ]
    if not model.has_tokenizer:
        words.append("--skip-tokenizer-init")
    if device is Device.CPU:
        words += CPU_FLAGS
    else:
        words += ["--base-gpu-id", str(place.gpu)]
        if place.shares_gpu:
            words += ["--mem-fraction-static", str(HALF_GPU_MEMORY)]
    if model.draft:
        words += [
            *("--speculative-algorithm", "EAGLE"),
            *("--speculative-draft-model-path", str(model.draft)),
            *("--speculative-num-steps", str(settings.steps)),
            *("--speculative-eagle-topk", str(settings.topk)),
            *("--speculative-num-draft-tokens", str(settings.draft_tokens)),
        ]
        if settings.layered_draft:
            words.append("--enable-multi-layer-eagle")
    words += _role_arguments(role, settings, place)
    return tuple(words)


def _role_arguments(role: Role, settings: Settings, place: Placement) -> list[str]:
    plenty = ["--max-total-tokens", str(PLENTY_OF_KV_TOKENS)]
    if role is Role.AGGREGATED:
        return plenty
    words = ["--disaggregation-mode", role.value]
    if role is Role.PREFILL:
        words += [*plenty, "--disaggregation-bootstrap-port", str(place.bootstrap_port)]
        return [*words, *settings.prefill_flags]
    words += ["--max-total-tokens", str(settings.decode_kv_tokens)]
    if settings.decode_reserved_tokens is not None:
        words += ["--num-reserved-decode-tokens", str(settings.decode_reserved_tokens)]
    if settings.decode_radix:
        words.append("--disaggregation-decode-enable-radix-cache")
    return [*words, *settings.decode_flags]


def environment(
    device: Device, path: tuple[Path, ...], temporary: Path, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Environment of a server that imports from `path` first and keeps its files in `temporary`.

    What the caller's environment says about SGLang and Mooncake stays; PYTHONPATH does not, for a
    tree in it would be served instead of the one that was asked for.
    """
    own = {**(CPU_ENVIRONMENT if device is Device.CPU else GPU_ENVIRONMENT)}
    preset = TRANSPORT_ENVIRONMENT | MODEL_ENVIRONMENT | HEALTH_ENVIRONMENT | HTTP_ENVIRONMENT
    own |= {name: base.get(name, value) for name, value in preset.items()}
    own |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "TMPDIR": str(temporary)}
    return {**base, **own}


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join("=".join(one) if isinstance(one, tuple) else one for one in value)
    return str(value)
