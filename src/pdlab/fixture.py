# SPDX-License-Identifier: Apache-2.0
"""EAGLE pairs with random weights whose draft nevertheless predicts the target.

The target is a Llama of random, seeded weights. Its draft is the same stack of layers, so it *is*
the target, one position later:

- Embedding rows have mean square 1 - eps, so the target's first input norm, which the EAGLE draft
  model does not have, is the identity. The draft model has no final norm either: that only
  scales the logits of a position and moves no argmax.
- The draft joins embedding and target hidden state by `fc`; `fc = [I, 0]` keeps the embedding.

At position p the draft reads token p + 1 and attends to tokens 1 to p + 1 in its own KV cache. It
misses token 0 only, so it agrees with the target nearly always, the more so the longer the context.
The prediction depends on the whole context: a draft whose KV cache is lost, stale or misplaced
agrees hardly more often than by chance, which is what makes the accept length a measurement.
"""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

RMS_EPS = 1e-5
# Attention has to be sharp for a prediction to hang on single earlier tokens.
QUERY_KEY_GAIN = 2.0
OUTPUT_GAIN = 1.5
MANIFEST = "fixture.json"
CONSTRUCTION = 1  # raise it when the same Fixture gives other bytes


@dataclass(frozen=True)
class Fixture:
    """Shape and seed of an EAGLE pair; the same values always give the same bytes.

    `layers` is that of target and draft alike. Raises ValueError, naming the field, for a shape
    that no Llama has.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: int = 1
    context: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            least = 0 if field == "seed" else 1
            if field != "name" and (not isinstance(value, int) or value < least):
                raise ValueError(
                    f"fixture {self.name}: {field} must be an int >= {least}: {value!r}"
                )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"fixture {self.name}: heads ({self.heads}) must be a multiple of kv_heads "
                f"({self.kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"fixture {self.name}: head_dim must be even for rotary embedding")


TINY = Fixture("tiny", hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=512)
WIDE = Fixture("wide", hidden=256, heads=8, kv_heads=4, head_dim=32, intermediate=512, vocab=4096)
PRESETS = {fixture.name: fixture for fixture in (TINY, WIDE)}


def write(fixture: Fixture, directory: Path | str) -> tuple[Path, Path]:
    """Write the pair below `directory` and return the paths of target and draft.

    Does nothing when that fixture is there already; replaces another fixture. Both are complete
    before they appear. Raises FileExistsError when `directory` holds something else.
    """
    directory = Path(directory)
    paths = directory / "target", directory / "draft"
    manifest = directory / MANIFEST
    if manifest.is_file() and _is_written(fixture, directory):
        return paths
    if directory.exists() and not manifest.is_file() and any(directory.iterdir()):
        raise FileExistsError(
            f"{directory} is not empty and holds no fixture: name another directory"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        fresh = Path(scratch) / "pair"
        target, draft = weights(fixture)
        _write_model(fresh / "target", target, _config(fixture, "LlamaForCausalLM"))
        _write_model(fresh / "draft", draft, _config(fixture, "LlamaForCausalLMEagle"))
        _write_json(fresh / MANIFEST, _manifest(fixture, fresh))
        if directory.exists():
            shutil.rmtree(directory)
        os.replace(fresh, directory)
    return paths


def weights(fixture: Fixture) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State dicts, float32, of target and draft under the names SGLang's loaders expect."""
    generator = torch.Generator().manual_seed(fixture.seed)

    def normal(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        # float64 until the end: sums then round alike whatever vector width the CPU has
        values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return values * gain

    def projection(outputs: int, inputs: int, gain: float = 1.0) -> Tensor:
        return normal(outputs, inputs, gain * inputs**-0.5)

    hidden, query, kv = (
        fixture.hidden,
        *(count * fixture.head_dim for count in (fixture.heads, fixture.kv_heads)),
    )
    embedding = normal(fixture.vocab, hidden)
    embedding *= ((1 - RMS_EPS) / embedding.square().mean(-1, keepdim=True)).sqrt()
    ones = torch.ones(hidden, dtype=torch.float64)

    shared = {"embed_tokens.weight": embedding}
    for i in range(fixture.layers):
        layer = {
            "self_attn.q_proj": projection(query, hidden, QUERY_KEY_GAIN),
            "self_attn.k_proj": projection(kv, hidden, QUERY_KEY_GAIN),
            "self_attn.v_proj": projection(kv, hidden),
            "self_attn.o_proj": projection(hidden, query, OUTPUT_GAIN),
            "mlp.gate_proj": projection(fixture.intermediate, hidden),
            "mlp.up_proj": projection(fixture.intermediate, hidden),
            "mlp.down_proj": projection(hidden, fixture.intermediate),
            "post_attention_layernorm": ones,
        }
        if i:  # the draft has no input norm in its first layer
            layer["input_layernorm"] = ones
        shared |= {f"layers.{i}.{name}.weight": value for name, value in layer.items()}
    head = normal(fixture.vocab, hidden)

    target = {f"model.{name}": value for name, value in shared.items()}
    target |= {
        "model.layers.0.input_layernorm.weight": ones,
        "model.norm.weight": ones,
        "lm_head.weight": head,
    }
    draft = shared | {
        "fc.weight": torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1),
        "fc.bias": torch.zeros(hidden),
        "lm_head.weight": head,
    }
    return _float32(target), _float32(draft)


def _float32(state: dict[str, Tensor]) -> dict[str, Tensor]:
    # a copy of each: safetensors refuses tensors that share memory
    return {name: value.to(torch.float32, copy=True).contiguous() for name, value in state.items()}


def _config(fixture: Fixture, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": fixture.hidden,
        "intermediate_size": fixture.intermediate,
        "num_hidden_layers": fixture.layers,
        "num_attention_heads": fixture.heads,
        "num_key_value_heads": fixture.kv_heads,
        "head_dim": fixture.head_dim,
        "vocab_size": fixture.vocab,
        "max_position_embeddings": fixture.context,
        "rms_norm_eps": RMS_EPS,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _write_model(directory: Path, state: dict[str, Tensor], config: dict[str, Any]) -> None:
    directory.mkdir(parents=True)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _manifest(fixture: Fixture, directory: Path) -> dict[str, Any]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    digests = {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != MANIFEST
    }
    return {"construction": CONSTRUCTION, "fixture": asdict(fixture), "sha256": digests}


def _is_written(fixture: Fixture, directory: Path) -> bool:
    try:
        found = json.loads((directory / MANIFEST).read_text())
    except ValueError:
        return False
    return bool(found == _manifest(fixture, directory) and found["sha256"])
