# SPDX-License-Identifier: Apache-2.0
"""The stand-in as a package: what it lacks says so, and it steps back for the real one."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from pdlab import standin
from pdlab.errors import LabError
from pdlab.standin import sgl_kernel

# What a CPU server of SGLang 0.5.23 with EAGLE and PD disaggregation loads.
SERVER_MODULES = [
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.layers.attention.intel_amx_backend",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.layers.attention.hybrid_attn_backend",
    "sglang.srt.speculative.draft_utils",
    "sglang.srt.speculative.eagle_worker_v2",
    "sglang.srt.speculative.multi_layer_eagle_worker_v2",
    "sglang.srt.models.llama",
    "sglang.srt.models.llama_eagle",
    "sglang.srt.disaggregation.prefill",
    "sglang.srt.disaggregation.decode",
    "sglang.srt.disaggregation.mooncake.conn",
]
# SGLang tries these and does without.
OPTIONAL = {"sgl_kernel.allreduce", "sgl_kernel.scalar_type"}


@pytest.fixture
def directory() -> Path:
    path = standin.python_path()
    if path is None:
        pytest.skip("the real sgl_kernel is installed")
    return path


def run(code: str, *paths: Path | str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment,
    )


def test_a_missing_operator_imports_and_names_itself_when_called() -> None:
    operator = sgl_kernel.fused_experts_cpu
    with pytest.raises(
        NotImplementedError, match=r"sgl_kernel\.fused_experts_cpu has no CPU stand-in"
    ):
        operator(1, key=2)


def test_from_its_path_it_is_sgl_kernel_with_all_submodules(directory: Path) -> None:
    code = """
        import sgl_kernel
        from sgl_kernel.kvcacheio import transfer_kv_direct
        from sgl_kernel.mamba import causal_conv1d_fn_cpu
        from sgl_kernel.speculative import reconstruct_indices_from_tree_mask
        print(sgl_kernel.__file__)
        transfer_kv_direct()
    """
    result = run(code, directory)
    assert Path(result.stdout.strip()).is_relative_to(directory / "sgl_kernel"), result.stderr
    assert "sgl_kernel.kvcacheio.transfer_kv_direct has no CPU stand-in" in result.stderr


def test_python_protocol_names_are_not_placeholders() -> None:
    with pytest.raises(AttributeError, match="__path_hooks__"):
        sgl_kernel.__path_hooks__  # noqa: B018


def test_an_unregistered_torch_operator_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match="fused_experts_cpu"):
        torch.ops.sgl_kernel.fused_experts_cpu  # noqa: B018


def test_every_import_of_sgl_kernel_on_the_cpu_path_succeeds(directory: Path) -> None:
    code = f"""
        import builtins, importlib, json
        load, outcome = builtins.__import__, {{}}

        def spy(name, globals=None, locals=None, fromlist=(), level=0):
            mine = level == 0 and name.split(".")[0] == "sgl_kernel"
            try:
                module = load(name, globals, locals, fromlist, level)
            except ImportError as error:
                if mine:
                    outcome[name] = str(error)
                raise
            if mine:
                outcome.setdefault(name, "")
            return module

        builtins.__import__ = spy
        for module in {SERVER_MODULES!r}:
            importlib.import_module(module)
        from sglang.srt.utils import cpu_has_amx_support, is_cpu
        print("RESULT" + json.dumps([outcome, is_cpu(), cpu_has_amx_support()]))
    """
    pytest.importorskip("sglang")
    result = run(code, directory)
    assert "RESULT" in result.stdout, result.stderr[-2000:]
    outcome, on_cpu, amx = json.loads(result.stdout.split("RESULT")[1])
    assert on_cpu
    assert not amx, "SGLang must not take the stand-in for a CPU build with AMX"
    assert outcome["sgl_kernel"] == ""
    assert {name: error for name, error in outcome.items() if error and name not in OPTIONAL} == {}


def test_the_stand_in_itself_does_not_count_as_the_real_package(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(directory))
    assert standin.python_path() == directory


def test_the_real_package_is_left_in_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert standin.python_path(sys.executable) is None


def test_an_interpreter_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no-such-python"):
        standin.python_path(str(tmp_path / "no-such-python"))
