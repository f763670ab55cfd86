# SPDX-License-Identifier: Apache-2.0
"""The property the lab stands on: the draft is the target, but only with its own KV cache."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdlab import fixture as fx
from pdlab.errors import LabError

CONTEXT = 200  # tokens of a test sequence
Past = Callable[[Tensor], Tensor]  # what becomes of the cached keys or values [tokens, heads, dim]

GARBAGE: dict[str, Past] = {
    "zero": torch.zeros_like,
    "unrelated": lambda rows: torch.randn_like(rows) * rows.std(),
    "lost in the first half": lambda rows: torch.cat([rows[:100] * 0, rows[100:]]),
}


def kept(rows: Tensor) -> Tensor:
    return rows


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + fx.RMS_EPS)


def rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] * fx.ROPE_THETA ** -(torch.arange(half) / half)
    cos, sin, (a, b) = angle.cos()[:, None], angle.sin()[:, None], x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(query: Tensor, key: Tensor, value: Tensor, past: Past) -> Tensor:
    """Causal attention, [tokens, heads, dim] each; earlier tokens are read through `past`."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scale = query.shape[-1] ** -0.5
    earlier = torch.ones(len(query), len(query)).tril(-1).bool()
    scores = torch.einsum("qhd,khd->hqk", query, past(key)) * scale
    scores = scores.masked_fill(~earlier, float("-inf"))
    own = (query * key).sum(-1).T[:, :, None] * scale
    weight = torch.cat([scores, own], -1).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", weight[:, :, :-1], past(value))
    return mixed + weight[:, :, -1].T[:, :, None] * value


def logits(
    shape: fx.Fixture, state: dict[str, Tensor], tokens: Tensor, past: Past = kept
) -> Tensor:
    """[tokens, vocab] of target or draft, the draft being the one without first and last norm."""
    target = "model.norm.weight" in state
    prefix = "model." if target else ""
    x = state[f"{prefix}embed_tokens.weight"][tokens]
    if not target:  # the part of `fc` that the target's hidden state would go through is zero
        x = F.linear(torch.cat([x, torch.randn_like(x)], -1), state["fc.weight"], state["fc.bias"])
    for i in range(shape.layers):
        weight = {
            name.removeprefix(f"{prefix}layers.{i}.").removesuffix(".weight"): value
            for name, value in state.items()
            if name.startswith(f"{prefix}layers.{i}.")
        }
        inner = norm(x) if target or i else x
        query, key, value = (
            F.linear(inner, weight[f"self_attn.{p}_proj"]).view(len(x), -1, shape.head_dim)
            for p in "qkv"
        )
        mixed = attend(rotate(query), rotate(key), value, past)
        x = x + F.linear(mixed.flatten(1), weight["self_attn.o_proj"])
        gate, up = (F.linear(norm(x), weight[f"mlp.{p}_proj"]) for p in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, weight["mlp.down_proj"])
    return F.linear(norm(x) if target else x, state["lm_head.weight"])


def agreement(shape: fx.Fixture, past: Past = kept, first: int = fx.BOS, skip: int = 0) -> float:
    """How often the draft, one token behind, predicts what the target predicts."""
    target, draft = fx.weights(shape)
    tokens = torch.tensor([first, *fx.prompt(shape, CONTEXT, seed=1)[1:]])
    torch.manual_seed(0)
    wanted = logits(shape, target, tokens)[1:].argmax(-1)
    guessed = logits(shape, draft, tokens[1:], past).argmax(-1)
    return (wanted == guessed)[skip:].float().mean().item()


SHAPES = [fx.TINY, fx.WIDE, dataclasses.replace(fx.TINY, name="two layers", layers=2)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_draft_predicts_what_the_target_does(shape: fx.Fixture) -> None:
    assert agreement(shape) == 1.0


@pytest.mark.parametrize("shape", [fx.TINY, fx.WIDE], ids=lambda shape: shape.name)
def test_without_bos_it_still_predicts_nearly_always(shape: fx.Fixture) -> None:
    assert 0.85 < agreement(shape, first=7, skip=40) < 1.0


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_it_predicts_little_once_its_kv_cache_is_garbage(shape: fx.Fixture, garbage: str) -> None:
    assert agreement(shape, GARBAGE[garbage], skip=100) < 0.35


@pytest.mark.parametrize("shape", [fx.TINY, fx.WIDE], ids=lambda shape: shape.name)
def test_predictions_are_many_different_tokens(shape: fx.Fixture) -> None:
    tokens = torch.tensor(fx.prompt(shape, CONTEXT, seed=2))
    predicted = logits(shape, fx.weights(shape)[0], tokens).argmax(-1)
    assert len(predicted.unique()) > CONTEXT / 2


def test_bos_is_invisible_within_the_whole_context() -> None:
    shape, ends = fx.TINY, [1, 8, 4000]
    state = fx.weights(shape)[0]
    prompt = torch.tensor(fx.prompt(shape, ends[-1] + 1, seed=3))
    seen = logits(shape, state, prompt)[1:]
    unseen = logits(shape, state, prompt[1:])
    for end in ends:
        torch.testing.assert_close(seen[end - 1], unseen[end - 1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("shape", [fx.TINY, fx.WIDE], ids=lambda shape: shape.name)
def test_transformers_reads_the_target_and_computes_the_same(
    shape: fx.Fixture, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    path, draft = fx.write(shape, tmp_path / "pair")
    config = transformers.AutoConfig.from_pretrained(path)
    assert (config.hidden_size, config.vocab_size) == (shape.hidden, shape.vocab)
    assert transformers.AutoConfig.from_pretrained(draft).num_hidden_layers == shape.layers
    model = transformers.LlamaForCausalLM.from_pretrained(path)
    tokens = torch.tensor(fx.prompt(shape, 50, seed=4))
    with torch.inference_mode():
        theirs = model(tokens[None]).logits[0]
    torch.testing.assert_close(
        theirs, logits(shape, fx.weights(shape)[0], tokens), atol=1e-3, rtol=1e-3
    )


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_the_same_fixture_is_the_same_bytes(tmp_path: Path) -> None:
    fx.write(fx.TINY, tmp_path / "one")
    fx.write(fx.TINY, tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    fx.write(dataclasses.replace(fx.TINY, seed=1), tmp_path / "three")
    other, name = contents(tmp_path / "three"), "target/model.safetensors"
    assert other[name] != contents(tmp_path / "one")[name]


def test_a_fixture_that_is_there_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = fx.write(fx.TINY, tmp_path / "pair")
    assert (target / "config.json").is_file() and (draft / "model.safetensors").is_file()
    monkeypatch.setattr(fx, "weights", lambda _: pytest.fail("written again"))
    assert fx.write(fx.TINY, tmp_path / "pair") == (target, draft)


@pytest.mark.parametrize("damage", ["another fixture", "a changed file", "a lost file", "manifest"])
def test_anything_else_in_its_place_is_replaced(tmp_path: Path, damage: str) -> None:
    target, draft = fx.write(fx.TINY, tmp_path / "pair")
    whole = contents(tmp_path / "pair")
    if damage == "another fixture":
        fx.write(dataclasses.replace(fx.TINY, seed=1), tmp_path / "pair")
    elif damage == "a changed file":
        (draft / "config.json").write_text("{}")
    elif damage == "a lost file":
        (target / "model.safetensors").unlink()
    else:
        (tmp_path / "pair" / fx.MANIFEST).write_text("not json")
    fx.write(fx.TINY, tmp_path / "pair")
    assert contents(tmp_path / "pair") == whole
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]


def test_somebody_elses_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LabError, match="is not empty and holds no fixture"):
        fx.write(fx.TINY, tmp_path)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(fx, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        fx.write(fx.TINY, tmp_path / "pair")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"heads": 3}, r"heads \(3\) must be a multiple of kv_heads \(2\)"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"head_dim": 8}, r"context \(4096\) too long for head_dim \(8\)"),
        ({"layers": 0}, "layers must be an int >= 1: 0"),
        ({"seed": -1}, "seed must be an int >= 0: -1"),
        ({"hidden": 2}, "no room"),
    ],
)
def test_an_impossible_shape_names_its_field(change: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(fx.TINY, **change)


def test_the_manifest_says_which_fixture_it_is(tmp_path: Path) -> None:
    fx.write(fx.TINY, tmp_path / "pair")
    manifest = json.loads((tmp_path / "pair" / fx.MANIFEST).read_text())
    assert fx.Fixture(**manifest["fixture"]) == fx.TINY


def test_prompts_begin_with_bos_and_repeat_by_seed() -> None:
    first = fx.prompt(fx.TINY, 40, seed=5)
    assert first[0] == fx.BOS and len(first) == 40
    assert not {fx.BOS, fx.EOS} & set(first[1:])
    assert first == fx.prompt(fx.TINY, 40, seed=5) != fx.prompt(fx.TINY, 40, seed=6)
