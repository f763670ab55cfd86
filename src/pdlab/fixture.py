# SPDX-License-Identifier: Apache-2.0
"""EAGLE pairs with random weights whose draft predicts the target exactly.

The target is a Llama of random, seeded weights. Its draft is the same stack of layers, so it *is*
the target, one position later:

- Embedding rows have mean square 1 - eps, so the target's first input norm, which the EAGLE draft
  model does not have, is the identity. The draft model has no final norm either: that only
  scales the logits of a position and moves no argmax.
- The draft joins embedding and target hidden state by `fc`; `fc = [I, 0]` keeps the embedding.
- At position p the draft reads token p + 1 and attends to tokens 1 to p + 1 in its own KV cache. It
  misses token 0 only, and where that is BOS the target does not see it either: in one rotary
  pair per head, the slowest, every query is constant and only the key of BOS is not zero, and it
  points the other way.

So for a prompt that begins with BOS every greedy draft is accepted: the ideal accept length is
num_steps + 1 (a few tenths less when prompts begin otherwise). A prediction depends on the whole
context: a draft whose KV cache is lost, stale or misplaced is hardly ever right, and stays wrong,
which is what makes the accept length a measurement.
"""

import hashlib
import json
import os
import random
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pdlab.errors import LabError

RMS_EPS = 1e-5
ROPE_THETA = 10_000.0
BOS, EOS = 1, 2
# Attention has to be sharp and strong for a prediction to hang on single earlier tokens.
QUERY_KEY_GAIN = 2.0
OUTPUT_GAIN = 3.0
# What BOS loses in every attention score; exp of it has to vanish next to float32's resolution.
BOS_PENALTY = 400.0
MAX_TURN = 1.4  # of the slowest rotary pair over the context, in rad; at pi / 2 BOS is seen again
ALWAYS, IS_BOS = 0, 1  # hidden dimensions: 1 for every token, 1 for BOS only
MANIFEST = "fixture.json"
CONSTRUCTION = 3  # raise it when the same Fixture gives other bytes


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
        turn = self.context * ROPE_THETA ** (2 / self.head_dim - 1)
        if turn > MAX_TURN:
            raise ValueError(
                f"fixture {self.name}: context ({self.context}) too long for head_dim "
                f"({self.head_dim}): the slowest rotary pair turns by {turn:.1f} > {MAX_TURN} rad"
            )
        if self.vocab <= EOS + 1 or self.hidden <= IS_BOS + 1:
            raise ValueError(
                f"fixture {self.name}: vocab and hidden leave no room beside BOS and EOS"
            )


TINY = Fixture("tiny", hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=512)
WIDE = Fixture("wide", hidden=256, heads=8, kv_heads=4, head_dim=32, intermediate=512, vocab=4096)
PRESETS = {fixture.name: fixture for fixture in (TINY, WIDE)}


def write(fixture: Fixture, directory: Path | str) -> tuple[Path, Path]:
    """Write the pair below `directory` and return the paths of target and draft.

    Does nothing when that fixture is there already; replaces another fixture. Both are complete
    before they appear. Raises LabError when `directory` holds something else.
    """
    directory = Path(directory)
    paths = directory / "target", directory / "draft"
    manifest = directory / MANIFEST
    if manifest.is_file() and _is_written(fixture, directory):
        return paths
    if directory.exists() and not manifest.is_file() and any(directory.iterdir()):
        raise LabError(f"{directory} is not empty and holds no fixture: name another directory")
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


def prompt(fixture: Fixture, length: int, seed: int) -> list[int]:
    """`length` token ids: BOS, then seeded random ones that are neither BOS nor EOS."""
    draw = random.Random(seed)
    return [BOS, *(draw.randrange(EOS + 1, fixture.vocab) for _ in range(length - 1))]


def weights(fixture: Fixture) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State dicts, float32, of target and draft under the names SGLang's loaders expect."""
    generator = torch.Generator().manual_seed(fixture.seed)

    def normal(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        # float64 until the end: sums then round alike whatever vector width the CPU has
        values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return values * gain

    def projection(outputs: int, inputs: int, gain: float = 1.0) -> Tensor:
        return normal(outputs, inputs, gain * inputs**-0.5)

    hidden, intermediate = fixture.hidden, fixture.intermediate
    query, kv = fixture.heads * fixture.head_dim, fixture.kv_heads * fixture.head_dim
    ones = torch.ones(hidden, dtype=torch.float64)
    shared = {"embed_tokens.weight": _embedding(normal(fixture.vocab, hidden))}
    for i in range(fixture.layers):
        layer = {
            "self_attn.q_proj": projection(query, hidden, QUERY_KEY_GAIN),
            "self_attn.k_proj": projection(kv, hidden, QUERY_KEY_GAIN),
            "self_attn.v_proj": projection(kv, hidden),
            "self_attn.o_proj": projection(hidden, query, OUTPUT_GAIN),
            "mlp.gate_proj": projection(intermediate, hidden),
            "mlp.up_proj": projection(intermediate, hidden),
            "mlp.down_proj": projection(hidden, intermediate),
            "post_attention_layernorm": ones,
        }
        _hide_bos(layer, fixture.head_dim)
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


def _embedding(rows: Tensor) -> Tensor:
    """`rows` [vocab, hidden] with the two marker dimensions set and mean square 1 - eps."""
    rows[:, [ALWAYS, IS_BOS]] = 0.0
    markers = torch.zeros_like(rows)
    markers[:, ALWAYS] = 1.0
    markers[BOS, IS_BOS] = 1.0
    energy = rows.shape[1] * (1 - RMS_EPS) - markers.square().sum(-1, keepdim=True)
    return rows * (energy / rows.square().sum(-1, keepdim=True)).sqrt() + markers


def _hide_bos(layer: dict[str, Tensor], head_dim: int) -> None:
    """Take BOS_PENALTY off the score of every key of BOS, and leave the markers as they are.

    The last rotary pair, (head_dim / 2 - 1, head_dim - 1) in Llama's layout, is the slowest: the
    penalty shrinks by the cosine of its turn, less than a quarter of a circle over the context.
    """
    size = (BOS_PENALTY * head_dim**0.5) ** 0.5
    for name, marker, value in (("q_proj", ALWAYS, size), ("k_proj", IS_BOS, -size)):
        weight = layer[f"self_attn.{name}"]
        heads = weight.view(-1, head_dim, weight.shape[1])
        heads[:, [head_dim // 2 - 1, head_dim - 1]] = 0.0
        heads[:, head_dim // 2 - 1, marker] = value
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        layer[name][[ALWAYS, IS_BOS]] = 0.0


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
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
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
