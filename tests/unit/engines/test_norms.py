"""The norms that a layer spec may name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from anygauge.kernels.table import resolve_kernels
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import ConfigError


def test_layer_norm_is_torchs_and_its_gradients_are_summed_like_a_norms(context: WorkerContext) -> None:
    from megatron.core.transformer.spec_utils import build_module

    from anygauge.engines.megatron.layers.provider import SpecProvider

    provider = SpecProvider(resolve_kernels(context.plugins, context.backend), unit_angles=True)
    config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=True)
    norm = build_module(provider.layer_norm(), config=config, hidden_size=16, eps=1e-6)
    expected = torch.nn.LayerNorm(16, eps=1e-6)
    weights = {"weight": torch.randn(16), "bias": torch.randn(16)}
    for module in (norm, expected):
        module.load_state_dict(weights)
    x = torch.randn(5, 3, 16)
    torch.testing.assert_close(norm(x), expected(x))
    assert all(parameter.sequence_parallel for parameter in norm.parameters())


def test_a_norm_over_all_heads_is_refused_where_ranks_divide_them(context: WorkerContext) -> None:
    from megatron.core.transformer.spec_utils import build_module

    from anygauge.engines.megatron.layers.provider import SpecProvider

    provider = SpecProvider(resolve_kernels(context.plugins, context.backend), unit_angles=True)
    config = SimpleNamespace(
        params_dtype=torch.float32,
        sequence_parallel=False,
        layernorm_zero_centered_gamma=False,
        tensor_model_parallel_size=1,
    )
    options = {"config": config, "hidden_size": 16, "eps": 1e-6}
    norm = build_module(provider.wide_norm(3), **options)
    x = torch.randn(5, 1, 3, 16)
    torch.testing.assert_close(
        norm(x), torch.nn.functional.rms_norm(x.flatten(2), (48,), eps=1e-6).view(x.shape)
    )
    config.tensor_model_parallel_size = 2
    with pytest.raises(ConfigError, match="tensor = 2 divides the heads"):
        build_module(provider.wide_norm(3), **options)
