"""Assumptions about SGLang on NPUs, checked in the source of the installed SGLang.

No NPU and no torch-npu is needed. docs/npu-patches.md says of which change of a patch each finding is.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anygauge.serving.sglang.arguments import argument_problems, command_line
from anygauge.serving.sglang.installed import Installed, installed_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
MASK = r"disable=_is_npu\)\s*def get_masked_input_and_mask"
FUSED_HEADS = r"split_qkv_rmsnorm_rope\(\s*qkv,.*?eps=.*?q_weight=.*?k_weight="
FINDINGS: Mapping[str, tuple[str, str]] = {
    "R1": (
        "hardware_backend/npu/attention/ascend_backend.py",
        r"def forward_decode_graph\(.*?npu_fused_infer_attention_score\.out\(.*?def forward_decode\(",
    ),
    "R3": (
        "hardware_backend/npu/graph_runner/npu_graph_runner.py",
        r"def _get_update_attr_name\(self\):.*?return self\.attr_name\[AttentionArch\.MLA\]",
    ),
    "R6": (
        "layers/rotary_embedding/base.py",
        r"and not \(_is_npu\).*?from sgl_kernel import rotary_embedding",
    ),
    "R10": ("layers/vocab_parallel_embedding.py", MASK),
    "R12": ("models/llama.py", r"def forward_prepare_npu\(.*?split_qkv_rmsnorm_rope\("),
    "R13": ("models/qwen3.py", FUSED_HEADS),
    "R14": ("models/qwen3.py", r"ParallelLMHead\([^)]*use_attn_tp_group=get_parallel\(\)\.enable_dp_lm_head"),
    "R15": ("models/qwen3_moe.py", FUSED_HEADS),
    "R17": ("models/qwen3_vl.py", r"np\.linspace\([^)]*dtype=np\.float32.*?def fast_pos_embed_interpolate"),
    "R18": ("models/qwen3_vl.py", r"use_hf_deepstack_order = \(.*?rl_on_policy_target is not None"),
    "R20": ("arg_groups/fields/mm.py", r"mm_enable_dp_encoder: A\[.*?fallback=False"),
    "R21": (
        "models/qwen3_vl.py",
        r'"model\.embed_tokens\.weight" in name\s+and self\.config\.tie_word_embeddings',
    ),
    "prompts in pieces": (
        "hardware_backend/npu/attention/ascend_backend.py",
        r"if self\.use_fia:\s+if self\._can_use_tnd\(layer\):.{0,900}key=k_cache\.view\(",
    ),
    "the platform": ("platforms/__init__.py", r"if _is_npu_available\(\):.*?return NPUSRTPlatform\(\)"),
    "the group of weights": (
        "model_executor/model_runner_components/weight_updater.py",
        r"def init_weights_update_group\(.*?init_custom_process_group\(\s*backend=backend,",
    ),
    "weights are finished": (
        "model_executor/model_runner_components/weight_updater.py",
        r"def begin_weight_update\(.*?restore_weights_before_loading\(.*?"
        r"def end_weight_update\(.*?postprocess_weights\(",
    ),
    "log-probs": (
        "layers/sampler.py",
        r"def _forward_ascend_backend\(.*?logits\.div_\(sampling_info\.temperatures\).*?"
        r"logprobs = torch\.log_softmax\(logits, dim=-1\)",
    ),
}
TILE = 16
"""Rows and columns of a tile of FRACTAL_NZ, in bfloat16."""
PARSE = """
import argparse, json, sys
from anygauge_cpu.env import declare_missing_operators
declare_missing_operators()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps(vars(parser.parse_args(sys.argv[1:])), default=str))
"""


@pytest.fixture(scope="module")
def installed() -> Installed:
    found = installed_sglang()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def arguments() -> Mapping[str, Any]:
    """Return the arguments of a server that shares its NPU; the backend's package is not installed here."""
    rollout = runpy.run_path(str(ROOT / "backends/npu/anygauge_npu/rollout.py"))
    given: Mapping[str, Any] = rollout["engine_args"]("sglang", sleeps=True)
    return given


@pytest.mark.parametrize("finding", FINDINGS)
def test_the_installed_source_does_it(finding: str) -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    name, pattern = FINDINGS[finding]
    source = (Path(spec.submodule_search_locations[0]) / "srt" / name).read_text()
    assert re.search(pattern, source, re.S), f"{finding}: {name}"


def test_the_backends_arguments_exist_with_these_values(
    arguments: Mapping[str, Any], installed: Installed
) -> None:
    owned = {"device", "enable_memory_saver"}  # no user may write them
    table = {name: value for name, value in arguments.items() if name not in owned}
    assert list(argument_problems(table, "rollout.sglang", installed)) == []
    assert arguments.keys() <= installed.arguments.keys()


def test_sglangs_parser_takes_them(arguments: Mapping[str, Any], installed: Installed) -> None:
    line = command_line({**arguments, "model_path": "model"}, installed)
    done = subprocess.run(
        [sys.executable, "-c", PARSE, *line], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout.splitlines()[-1])
    assert {name: parsed[name] for name in arguments} == dict(arguments)
    assert not parsed["mm_enable_dp_encoder"]


@pytest.mark.filterwarnings("ignore")  # of imports
@pytest.mark.parametrize(("variable", "dtype"), [("0", torch.bfloat16), ("1", torch.float32)])
def test_angles_are_rounded_unless_a_variable_says_otherwise(
    variable: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.rotary_embedding import base

    monkeypatch.setenv("SGLANG_ROPE_CACHE_FP32", variable)
    monkeypatch.setattr(base, "_is_npu", True)
    rotary = base.RotaryEmbedding(
        head_size=64,
        rotary_dim=64,
        max_position_embeddings=64,
        base=10000,
        is_neox_style=True,
        dtype=torch.bfloat16,
    )
    assert rotary.cos_sin_cache.dtype == dtype
    calls = []
    fused = lambda query, key, angles, *_: calls.append(angles.dtype)  # noqa: E731
    monkeypatch.setattr(base, "fused_rope_qk_mqa", fused, raising=False)  # in sgl-kernel-npu
    monkeypatch.setattr(
        base, "torch_npu", SimpleNamespace(npu_mrope=lambda *given, **_: given[1:3]), raising=False
    )
    query, key = (torch.rand(4, 128).bfloat16() for _ in range(2))
    rotary.forward_npu(torch.arange(4), query, key)
    assert calls == ([torch.float32] if dtype == torch.float32 else [])


class TiledLayout:
    """A stand-in for FRACTAL_NZ: the bytes of a tensor are its tiles, and its shape says nothing of that.

    Rows that are copied into such a tensor are not tiled, which is what an update must not rely on.
    """

    def __init__(self) -> None:
        self.tiled: set[int] = set()

    def npu_format_cast(self, tensor: torch.Tensor, acl_format: int) -> torch.Tensor:
        if tensor.data_ptr() in self.tiled:
            return tensor
        tiles = tensor.data.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE))
        cast = tiles.transpose(-3, -2).contiguous().view(tensor.shape)
        self.tiled.add(cast.data_ptr())
        return cast

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor."""
        if tensor.data_ptr() not in self.tiled:
            return tensor.data
        experts, rows, columns = tensor.shape
        tiles = tensor.data.view(experts, rows // TILE, columns // TILE, TILE, TILE)
        return tiles.transpose(-3, -2).reshape(tensor.shape)


@pytest.mark.filterwarnings("ignore")  # of imports
@pytest.mark.parametrize(("variable", "survives"), [("1", True), ("0", False)])
def test_an_update_of_experts_needs_torchs_layout(
    variable: str, survives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.hardware_backend.npu import utils
    from sglang.srt.layers.quantization.unquant import NPUUnquantMoEMethod, UnquantizedFusedMoEMethod

    (name,) = runpy.run_path(str(ROOT / "backends/npu/anygauge_npu/env.py"))["SERVER"]
    layout, method = TiledLayout(), NPUUnquantMoEMethod()
    monkeypatch.setenv(name, variable)
    monkeypatch.setattr(utils, "_is_npu", True)
    # its operators for those of an NPU, and no device that it takes for the host
    operators = SimpleNamespace(npu=layout)
    monkeypatch.setattr(utils, "torch", SimpleNamespace(**{**vars(torch), "ops": operators, "device": str}))
    first, second = (torch.rand(2, 32, 48, device="cpu").bfloat16() for _ in range(2))
    layer = SimpleNamespace(w2_weight=torch.nn.Parameter(first.clone(), requires_grad=False))
    method.process_weights_after_loading(layer, "w2")
    assert torch.equal(layout.read(layer.w2_weight), first)
    begin = UnquantizedFusedMoEMethod.restore_weights_before_loading
    begin(SimpleNamespace(use_flashinfer_trtllm_moe=False), layer)
    for expert in range(2):  # as a model's loader does
        layer.w2_weight.data[expert].copy_(second[expert])
    method.process_weights_after_loading(layer, "w2")
    assert torch.equal(layout.read(layer.w2_weight), second) is survives
