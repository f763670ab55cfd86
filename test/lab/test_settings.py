# SPDX-License-Identifier: Apache-2.0
"""Command lines and environments say what the settings say, on a CPU and on a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdlab import router
from pdlab.errors import LabError
from pdlab.settings import (
    Device,
    Model,
    Placement,
    Role,
    Settings,
    environment,
    read_model,
    server_arguments,
)

MODEL = Model(Path("/models/target"), Path("/models/draft"), 512, 4096)
PLACE = Placement(port=20001, nccl_port=20002, bootstrap_port=20003)


def options(
    role: Role, settings: Settings, device: Device = Device.CPU, model: Model = MODEL,
    place: Placement = PLACE,
) -> dict[str, str]:  # fmt: skip
    """Flags with their values; a flag without one has an empty value."""
    words = server_arguments(role, settings, model, device, place)
    starts = [number for number, word in enumerate(words) if word.startswith("--")]
    ends = [*starts[1:], len(words)]
    return {words[a]: " ".join(words[a + 1 : b]) for a, b in zip(starts, ends, strict=True)}


def test_prefill_and_decode_know_their_roles() -> None:
    prefill, decode = (options(role, Settings()) for role in (Role.PREFILL, Role.DECODE))
    assert prefill["--disaggregation-mode"] == "prefill"
    assert prefill["--disaggregation-bootstrap-port"] == "20003"
    assert decode["--disaggregation-mode"] == "decode"
    assert "--disaggregation-bootstrap-port" not in decode
    assert "--disaggregation-mode" not in options(Role.AGGREGATED, Settings())


def test_pressure_is_put_on_decode_alone() -> None:
    pressed = Settings(decode_kv_tokens=1200, decode_reserved_tokens=8)
    decode = options(Role.DECODE, pressed)
    assert decode["--max-total-tokens"] == "1200"
    assert decode["--num-reserved-decode-tokens"] == "8"
    for role in (Role.PREFILL, Role.AGGREGATED):
        assert int(options(role, pressed)["--max-total-tokens"]) > 10_000
        assert "--num-reserved-decode-tokens" not in options(role, pressed)
    assert "--num-reserved-decode-tokens" not in options(Role.DECODE, Settings())


def test_pages_are_the_same_on_both_ends_and_the_radix_cache_is_decode_s() -> None:
    prefix = Settings(page_size=16, decode_radix=True)
    prefill, decode = (options(role, prefix) for role in (Role.PREFILL, Role.DECODE))
    assert prefill["--page-size"] == decode["--page-size"] == "16"
    assert "--disaggregation-decode-enable-radix-cache" in decode
    assert "--disaggregation-decode-enable-radix-cache" not in prefill


@pytest.mark.parametrize(("topk", "draft_tokens"), [(1, "4"), (4, "8")])
def test_a_wider_draft_tree_verifies_more_tokens(topk: int, draft_tokens: str) -> None:
    found = options(Role.DECODE, Settings(topk=topk))
    assert found["--speculative-eagle-topk"] == str(topk)
    assert found["--speculative-num-draft-tokens"] == draft_tokens


def test_without_a_draft_nothing_is_speculative() -> None:
    found = options(Role.DECODE, Settings(), model=replace(MODEL, draft=None))
    assert not any(flag.startswith("--speculative") for flag in found)


def test_a_draft_of_several_layers_is_drafted_with_on_both_ends() -> None:
    for role in (Role.PREFILL, Role.DECODE):
        assert "--enable-multi-layer-eagle" in options(role, Settings(layered_draft=True))
        assert "--enable-multi-layer-eagle" not in options(role, Settings())


def test_flags_for_one_role_reach_that_role_alone() -> None:
    settings = Settings(prefill_flags=("--p", "1"), decode_flags=("--d",))
    assert options(Role.PREFILL, settings)["--p"] == "1"
    assert "--d" not in options(Role.PREFILL, settings)
    assert "--d" in options(Role.DECODE, settings)
    assert not {"--p", "--d"} & set(options(Role.AGGREGATED, settings))


def test_a_gpu_gets_no_cpu_flags() -> None:
    place = replace(PLACE, gpu=1)
    found = options(Role.DECODE, Settings(), Device.CUDA, place=place)
    assert found["--base-gpu-id"] == "1"
    cpu = {"--device", "--dtype", "--attention-backend", "--cuda-graph-backend-decode"}
    assert not cpu & set(found)
    assert "--mem-fraction-static" not in found
    shared = options(Role.DECODE, Settings(), Device.CUDA, place=replace(place, shares_gpu=True))
    assert float(shared["--mem-fraction-static"]) < 0.5


def test_a_tokenizer_is_used_where_there_is_one(tmp_path: Path) -> None:
    model = replace(MODEL, target=tmp_path)
    assert "--skip-tokenizer-init" in options(Role.PREFILL, Settings(), model=model)
    (tmp_path / "tokenizer.json").touch()
    assert "--skip-tokenizer-init" not in options(Role.PREFILL, Settings(), model=model)


def test_the_environment_puts_the_tree_first_and_drops_another_one() -> None:
    base = {"PYTHONPATH": "/another/tree", "HOME": "/home/me", "MC_FORCE_TCP": "0"}
    found = environment(Device.CPU, (Path("/tree"), Path("/lab")), Path("/tmp/x"), base)
    assert found["PYTHONPATH"] == "/tree:/lab"
    assert found["HOME"] == "/home/me"
    assert found["MC_FORCE_TCP"] == "0"  # the transport is the caller's to choose
    assert found["MOONCAKE_PROTOCOL"] == "tcp"
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["TMPDIR"] == "/tmp/x"
    assert found["SGLANG_HEALTH_CHECK_TIMEOUT"] == "3"
    patient = environment(Device.CPU, (), Path("/tmp/x"), {"SGLANG_HEALTH_CHECK_TIMEOUT": "20"})
    assert patient["SGLANG_HEALTH_CHECK_TIMEOUT"] == "20"


@pytest.mark.parametrize("device", Device)
def test_the_router_ends_unused_connections_before_a_server_does(device: Device) -> None:
    found = environment(device, (), Path("/tmp/x"), {})
    assert float(found["SGLANG_TIMEOUT_KEEP_ALIVE"]) > router.UNUSED_S


def test_a_gpu_gets_no_cpu_environment() -> None:
    found = environment(Device.CUDA, (Path("/tree"),), Path("/tmp/x"), {})
    assert not {"OMP_NUM_THREADS", "SGLANG_USE_CPU_ENGINE", "TRITON_INTERPRET"} & set(found)


def test_settings_are_described_by_what_differs() -> None:
    assert Settings().describe() == "default settings"
    described = Settings(page_size=16, decode_radix=True, decode_flags=("--x", "1")).describe()
    assert described == "page size 16, decode radix on, decode flags --x 1"


def test_the_router_is_told_both_ends() -> None:
    words = router.arguments(1, 2, "http://127.0.0.1:3", 4, "http://127.0.0.1:5")
    at = words.index("--prefill")
    assert words[at : at + 5] == ("--prefill", "http://127.0.0.1:3", "4", "--decode",
                                  "http://127.0.0.1:5")  # fmt: skip
    assert "--mini-lb" not in words
    assert "--disable-retries" in words


def test_a_model_is_read_from_its_config(tmp_path: Path) -> None:
    config = {"text_config": {"vocab_size": 99, "max_position_embeddings": 77}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(tmp_path, None)
    assert (model.vocab, model.context) == (99, 77)
    assert not model.has_tokenizer


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"model path .*none does not exist"):
        read_model(tmp_path / "none", None)
    with pytest.raises(LabError, match=r"holds no config\.json"):
        read_model(tmp_path, None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LabError, match="does not say 'vocab_size'"):
        read_model(tmp_path, None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LabError, match=r"config\.json is not JSON"):
        read_model(tmp_path, None)
