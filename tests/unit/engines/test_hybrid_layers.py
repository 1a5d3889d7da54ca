"""Modules of hybrid families, in cases that a whole float32 model on one process does not show."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from anygauge.kernels.table import KernelTable, resolve_kernels
from anygauge.plugins import Plugins
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import ConfigError
from anygauge_tests.engine_config import engine_config


@pytest.fixture(scope="module")
def kernels(context: WorkerContext, plugins: Plugins) -> KernelTable:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    return resolve_kernels(plugins, context.backend)


def config(**fields: Any) -> Any:
    return SimpleNamespace(
        params_dtype=torch.bfloat16, sequence_parallel=False, layernorm_zero_centered_gamma=True, **fields
    )


def test_a_zero_centered_norm_rounds_once(kernels: KernelTable) -> None:
    from anygauge.engines.megatron.layers.modules import RmsNorm

    torch.manual_seed(0)
    ours, theirs = RmsNorm(config(), 64, 1e-6, kernels), Qwen3_5RMSNorm(64, 1e-6)
    weight = (torch.randn(64) * 0.01).bfloat16()
    x = torch.randn(50, 64).bfloat16()
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
    assert torch.equal(ours(x), theirs(x))


def test_the_norm_of_a_delta_net_is_not_zero_centered(kernels: KernelTable) -> None:
    from anygauge.engines.megatron.layers.gated_delta import GatedNorm

    torch.manual_seed(0)
    ours, theirs = GatedNorm(config(), 16, 1e-6, kernels), Qwen3_5RMSNormGated(16, 1e-6)
    weight, (x, gate) = torch.randn(16).bfloat16(), torch.randn(2, 50, 3, 16).bfloat16()
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
    found, expected = ours(x, gate).float(), theirs(x.float(), gate.float())
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)


def test_heads_are_not_cut(kernels: KernelTable) -> None:
    from anygauge.engines.megatron.layers.gated_delta import _check_heads

    _check_heads(config(linear_num_key_heads=16), 8)
    with pytest.raises(ConfigError, match=r"16 key heads .* train\.parallel\.context = 32"):
        _check_heads(config(linear_num_key_heads=16), 32)


def test_what_a_checkpoint_has_in_more_bits_than_the_model_is_named(
    context: WorkerContext, plugins: Plugins, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Published checkpoints in bfloat16 have some tensors in float32."""
    fields = dict(plugins.get("register_models", "qwen3_5").tiny())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    for dtype in ("float32", "bfloat16"):
        model.to(getattr(torch, dtype)).save_pretrained(tmp_path / dtype)
    shutil.copytree(tmp_path / "bfloat16", tmp_path / "mixed")
    tensors = load_file(tmp_path / "mixed" / "model.safetensors")
    mixed = {name: each.float() + 1e-4 if name.endswith("A_log") else each for name, each in tensors.items()}
    save_file(mixed, tmp_path / "mixed" / "model.safetensors", {"format": "pt"})

    for name, dtype in (("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("mixed", "float32")):
        make_engine(context, tmp_path / name, dtype)
    assert not caplog.messages
    make_engine(context, tmp_path / "mixed", "bfloat16")
    (message,) = caplog.messages
    rounded = sorted(name for name, tensor in mixed.items() if tensor.dtype == torch.float32)
    assert message.endswith(f"{len(rounded)} tensors are rounded to train.dtype: {', '.join(rounded)}")


def make_engine(context: WorkerContext, path: Path, dtype: str) -> Any:
    config = engine_config(path, train={"dtype": dtype})
    return context.plugins.get("register_train_engines", "megatron").make(config, context)
