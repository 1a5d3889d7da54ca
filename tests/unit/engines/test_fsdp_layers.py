"""Layers of transformers with kernels of the table: which take them, and that wrong ones are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from anygauge.engines.fsdp.attention import ATTENTION, _Attention, packing_arguments, register_attention
from anygauge.engines.fsdp.layers import _Joined, find_table_layers
from anygauge.kernels import reference
from anygauge.kernels.table import KernelTable, resolve_kernels
from anygauge.plugins import Plugins
from anygauge_hooks.kernels import KernelImpl, KernelOp

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}
MODELS: Mapping[str, tuple[dict[str, Any], Mapping[str, int]]] = {
    "Qwen3": ({}, {"Qwen3Attention": 2, "Qwen3MLP": 2, "Qwen3RMSNorm": 9}),
    "SmolLM3": (  # its second layer does not rotate
        {"no_rope_layers": [1, 0], "pad_token_id": None},
        {"SmolLM3Attention": 1, "SmolLM3MLP": 2, "SmolLM3RMSNorm": 5},
    ),
    "Mistral": ({"sliding_window": 4}, {"MistralMLP": 2, "MistralRMSNorm": 5}),  # its window is in the config
    "Cohere2": ({}, {"Cohere2MLP": 2}),  # rotates neighboring dimensions
    "Olmo2": ({}, {"Olmo2MLP": 2, "Olmo2RMSNorm": 9}),  # its norms are over all heads
    "StableLm": (  # rotates a quarter of the dimensions
        {"use_cache": False},
        {"StableLmAttention": 2, "StableLmMLP": 2, "LayerNorm": 5},
    ),
}
"""Further config of an architecture, and how many of its layers take kernels."""


@pytest.fixture(scope="module")
def kernels(plugins: Plugins) -> KernelTable:
    table = resolve_kernels(plugins, plugins.get("register_backends", "cpu"))
    register_attention(table)
    return table


def model_of(name: str) -> Any:
    options = MODELS[name][0]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    ).eval()


def found(model: nn.Module, kernels: KernelTable) -> Counter[str]:
    return Counter(type(module).__name__ for module, _ in find_table_layers(model, kernels, CPU).modules)


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_compute_the_same_take_kernels(kernels: KernelTable, name: str) -> None:
    assert found(model_of(name), kernels) == MODELS[name][1]


def with_window(layer: Any) -> None:
    layer.self_attn.sliding_window = 4


def with_gelu(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


def with_mask(layer: Any) -> None:
    layer.mlp.register_buffer("mask", torch.ones(32))


@pytest.mark.parametrize(
    ("change", "kind", "count"),
    [(with_window, "Qwen3Attention", 2), (with_gelu, "Qwen3MLP", 1), (with_mask, "Qwen3MLP", 1)],
)
def test_each_layer_is_compared(
    kernels: KernelTable, change: Callable[[Any], None], kind: str, count: int
) -> None:
    model = model_of("Qwen3")
    change(model.model.layers[1])
    assert found(model, kernels)[kind] == count


def wide_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return reference.rms_norm(x, weight, 2 * eps)


def backward_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return reference.rotary_embedding(q, k, cos, -sin)


def swapped_swiglu(gate_up: Tensor) -> Tensor:
    up, gate = gate_up.chunk(2, -1)
    return F.silu(gate) * up


WRONG: Mapping[KernelOp, tuple[Callable[..., Any], str]] = {
    "rms_norm": (wide_norm, "Qwen3RMSNorm"),
    "rotary_embedding": (backward_rotation, "Qwen3Attention"),
    "swiglu": (swapped_swiglu, "Qwen3MLP"),
}


@pytest.mark.parametrize("op", WRONG)
def test_a_wrong_kernel_is_refused(
    kernels: KernelTable, op: KernelOp, caplog: pytest.LogCaptureFixture
) -> None:
    """Also a norm whose epsilon is twice as large."""
    function, kind = WRONG[op]
    table = kernels.preferring("test", [KernelImpl(op=op, fn=function, source="wrong")])
    model = model_of("Qwen3")
    everything = found(model, kernels)
    caplog.set_level("INFO")
    assert found(model, table) == Counter({n: c for n, c in everything.items() if n != kind})
    assert f"{kind}: {everything[kind]} layers keep transformers' own code" in caplog.text


def results(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of two packed sequences, and gradients."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = ATTENTION
    packing = packing_arguments(torch.tensor([0, 7, 12], dtype=torch.int32), [7, 5])
    positions = torch.cat((torch.arange(7), torch.arange(5)))[None]
    model.zero_grad()
    logits = model(torch.arange(12)[None], position_ids=positions, use_cache=False, **packing).logits
    logits.log_softmax(-1)[..., 0].sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return logits.detach(), gradients


def test_bound_layers_compute_what_they_did(kernels: KernelTable) -> None:
    """Packed, with gradients; and given back their classes, they are transformers' own again."""
    model = model_of("Qwen3")
    layers = find_table_layers(model, kernels, CPU)
    kinds = [type(module) for module, _ in layers.modules]
    expected, gradients = results(model)
    restore = layers.bind(kernels, torch.float32)
    assert all(type(module) not in kinds for module, _ in layers.modules)
    bound, bound_gradients = results(model)
    torch.testing.assert_close(bound, expected, rtol=0, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(bound_gradients[name], gradient, rtol=1e-4, atol=1e-5)
    restore()
    assert [type(module) for module, _ in layers.modules] == kinds
    assert results(model)[0].equal(expected)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_hooks_of_linear_layers_are_called(kernels: KernelTable, name: str) -> None:
    """Adapters are such hooks."""
    model = model_of("Qwen3")
    layers = find_table_layers(model, kernels, CPU)
    model.model.layers[0].mlp.get_submodule(name).register_forward_hook(lambda *given: given[-1] * 2)
    expected = results(model)[0]
    layers.bind(kernels, torch.float32)
    torch.testing.assert_close(results(model)[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("given", [{"softcap": 2.0}, {"sliding_window": 2, "is_causal": False}])
def test_sinks_that_no_path_computes_are_refused(kernels: KernelTable, given: dict[str, Any]) -> None:
    x = torch.ones(1, 2, 4, 8)
    packing = packing_arguments(torch.tensor([0, 4], dtype=torch.int32), [4])
    with pytest.raises(NotImplementedError, match="sinks"):
        _Attention(kernels)(None, x, x, x, None, s_aux=torch.ones(2), **packing, **given)


@pytest.mark.parametrize("needed", [(True, True, True), (True, False, False), (False, True, False)])
def test_joined_products_have_gradients(needed: tuple[bool, bool, bool]) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, 4), (5, 4), (6, 4)
    tensors = [
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(wanted)
        for shape, wanted in zip(shapes, needed, strict=True)
    ]
    x, one, other = tensors
    assert torch.autograd.gradcheck(_Joined.apply, tensors)
    torch.testing.assert_close(_Joined.apply(*tensors), torch.cat((x @ one.t(), x @ other.t()), -1))
