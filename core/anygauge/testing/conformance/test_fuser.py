"""Functions that ``make_jit_fuser`` fuses compute what they did."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anygauge.plugins import Plugins
from anygauge.testing.conformance.process_state import rng_untouched, state_untouched
from anygauge.testing.conformance.tolerances import TOLERANCES
from anygauge_hooks.types import BackendSpec, Device

pytestmark = pytest.mark.conformance

Function = Callable[..., Any]


def bias_gelu(bias: Tensor, x: Tensor) -> Tensor:
    """Return what Megatron fuses in its MLP."""
    y = bias + x
    return y * 0.5 * (1.0 + torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y)))


def weighted(x: Tensor, weight: Tensor, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Return two tensors, and have a default."""
    return F.silu(x) * weight * scale, x.sum(dim=-1)


def dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Take nothing for a tensor."""
    return residual + (x if bias is None else x + bias)


CALLS: dict[str, tuple[Function, Callable[[Function], Function]]] = {
    "gelu": (bias_gelu, lambda fn: lambda a, b: fn(b[0], a)),
    "keywords": (bias_gelu, lambda fn: lambda a, b: fn(x=a, bias=b[0])),
    "default": (weighted, lambda fn: fn),
    "given": (weighted, lambda fn: lambda a, b: fn(a, weight=b, scale=-3.0)),
    "none": (dropout_add, lambda fn: lambda a, b: fn(a, None, b)),
    "bias": (dropout_add, lambda fn: lambda a, b: fn(a, b[1], b)),
}


@pytest.fixture(scope="module")
def fuse(plugins: Plugins, backend: BackendSpec, device: Device) -> Function:
    """Return the decorator; the identity where the backend has none, as the engine takes it."""
    megatron = {name for name in sys.modules if name.startswith("megatron")}
    with rng_untouched(device), state_untouched():
        fuser = plugins.first("make_jit_fuser", backend=backend)
    assert {name for name in sys.modules if name.startswith("megatron")} == megatron
    assert fuser is None or callable(fuser)
    return fuser or (lambda function: function)


def results(function: Function, shape: tuple[int, int], dtype: torch.dtype, device: Device) -> list[Tensor]:
    """Return outputs and gradients of a function of two tensors."""
    generator = torch.Generator().manual_seed(shape[0])
    inputs = [
        torch.randn(shape, generator=generator).to(device.torch_device, dtype).requires_grad_() for _ in "ab"
    ]
    outputs = function(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    assert all(output.requires_grad for output in outputs)
    gradients = torch.autograd.grad([output.float().square().sum() for output in outputs], inputs)
    return [*outputs, *gradients]


@pytest.mark.parametrize("name", CALLS)
def test_a_fused_function_computes_the_same(fuse: Function, device: Device, name: str) -> None:
    function, call = CALLS[name]
    fused = fuse(function)
    assert callable(fused)
    for shape, dtype in (((4, 6), torch.float32), ((3, 8), torch.float32), ((4, 6), torch.bfloat16)):
        relative, absolute = TOLERANCES[str(dtype).removeprefix("torch.")]
        with rng_untouched(device):
            given = results(call(fused), shape, dtype, device)
        for ours, theirs in zip(given, results(call(function), shape, dtype, device), strict=True):
            assert ours.dtype == theirs.dtype
            limit = absolute * max(1.0, theirs.detach().abs().max().item())
            torch.testing.assert_close(ours, theirs, rtol=relative, atol=limit)


def test_numbers_may_change_from_call_to_call(fuse: Function, device: Device) -> None:
    fused = fuse(weighted)
    for scale in (2.0, -3.0, 0.5):
        given, expected = (
            results(lambda a, b, f=function: f(a, b, scale), (4, 6), torch.float32, device)  # noqa: B023 - at once
            for function in (fused, weighted)
        )
        for ours, theirs in zip(given, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_fused_function_without_gradients_makes_none(fuse: Function, device: Device) -> None:
    x = torch.ones(2, 3, device=device.torch_device, requires_grad=True)
    with torch.no_grad():
        assert not fuse(bias_gelu)(x[0], x).requires_grad


def test_functions_are_fused_each_by_itself(fuse: Function, device: Device) -> None:
    doubled, halved = (fuse(scaled(factor)) for factor in (2.0, 0.5))
    x = torch.ones(4, device=device.torch_device)
    assert [doubled(x).tolist(), halved(x).tolist()] == [[2.0] * 4, [0.5] * 4]
    assert x.tolist() == [1.0] * 4


def scaled(factor: float) -> Function:
    """Return functions that differ in nothing but what they hold."""

    def scale(x: Tensor) -> Tensor:
        return x * factor

    return scale


def test_an_error_of_a_fused_function_arrives(fuse: Function, device: Device) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        fuse(bias_gelu)(
            torch.ones(3, device=device.torch_device), torch.ones(4, 4, device=device.torch_device)
        )
