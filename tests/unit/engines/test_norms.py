"""The norms that a layer spec may name."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from anygauge.kernels.table import resolve_kernels
from anygauge_hooks.engines import WorkerContext


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
