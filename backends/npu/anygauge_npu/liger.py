"""Liger's Triton kernels for Ascend, where triton-ascend and liger-kernel are installed.

Second to torch-npu's operators. ``anygauge hooks`` shows them, and the conformance suite compares them where
they can run. They have not run here: a test holds calls to the arguments in ``contract/liger_kernel-*.json``.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from anygauge_hooks.kernels import KernelImpl
from anygauge_npu.guards import DTYPES, check_dtypes, check_shape, refuse

__all__ = ["MODULES", "liger_kernels"]

PACKAGE = "liger_kernel.ops.backends._ascend.ops"
MODULES = {
    "layer_norm": "LigerLayerNormFunction",
    "rms_norm": "LigerRMSNormFunction",
    "swiglu": "LigerSiLUMulFunction",
}
"""Files of the package, and the autograd function that we take from each."""

SECOND = -1


def liger_kernels() -> list[KernelImpl]:
    """Return the kernels."""
    functions: dict[Any, Any] = {"layer_norm": layer_norm, "rms_norm": rms_norm, "swiglu": swiglu}
    return [
        KernelImpl(
            op=op,
            fn=fn,
            source=f"{PACKAGE}.{op}",
            dtypes=DTYPES,
            priority=SECOND,
            requires=("torch_npu", "liger_kernel", "triton"),
        )
        for op, fn in functions.items()
    ]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / rms(x) * weight``, computed in float32.

    :param x: ``[..., D]``.
    :param weight: ``[D]``.
    :returns: ``[..., D]``, the dtype of ``x``.
    """
    check_dtypes("rms_norm", x=x, weight=weight)
    check_shape("rms_norm", "weight", weight, x.shape[-1:], "[D]")
    if not x.numel():
        return x * weight
    # "gemma" multiplies before it rounds; in place, backward would overwrite a gradient that is not its own
    y: Tensor = _function("rms_norm").apply(x, weight, eps, 0.0, "gemma", False)
    return y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the layer norm of ``x``.

    :param x: ``[..., D]``.
    :param weight: ``[D]``.
    :param bias: ``[D]``.
    :returns: ``[..., D]``, the dtype of ``x``.
    """
    check_dtypes("layer_norm", x=x, weight=weight, bias=bias)
    for name, parameter in (("weight", weight), ("bias", bias)):
        check_shape("layer_norm", name, parameter, x.shape[-1:], "[D]")
    if not x.numel():
        return x * weight + bias
    y: Tensor = _function("layer_norm").apply(x, weight, bias, eps)
    return y


def swiglu(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``.

    :param gate_up: ``[..., 2 F]``.
    :returns: ``[..., F]``.
    """
    check_dtypes("swiglu", gate_up=gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        refuse("swiglu", f"gate_up of shape {list(gate_up.shape)}", "Its last dimension is gate and up, 2 F.")
    gate, up = (half.contiguous() for half in gate_up.chunk(2, dim=-1))
    if not gate.numel():
        return gate * up
    y: Tensor = _function("swiglu").apply(gate, up)
    return y


def _function(module: str) -> Any:
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), MODULES[module])
