"""Norms and the gated activation: fused operators whose gradients torch-npu has too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from anygauge_npu.guards import check_dtypes, check_shape, check_size, refuse

__all__ = ["layer_norm", "rms_norm", "swiglu"]

WIDEST = (1 << 31) - 1


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / rms(x) * weight``, reduced in float32.

    See :class:`anygauge_hooks.kernels.RmsNorm`.

    :raises KernelInputError: The operator does not take these tensors.
    """
    _check("rms_norm", x, weight=weight)
    if not x.numel():
        return x * weight
    # the operator takes 2 to 8 dimensions, and its documentation says nothing of strides
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    normed: Tensor = torch.ops.npu.npu_rms_norm(rows, weight.contiguous(), epsilon=eps)[0]
    return normed.view(x.shape)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the layer norm of ``x``: torch's own, fused here; in float32, as the contract has it.

    See :class:`anygauge_hooks.kernels.LayerNorm`.

    :raises KernelInputError: The operator does not take these tensors.
    """
    _check("layer_norm", x, weight=weight, bias=bias)
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype)


def _check(op: str, x: Tensor, **parameters: Tensor) -> None:
    """Refuse what a norm over the last dimension does not take."""
    check_dtypes(op, x=x, **parameters)
    if x.dim() == 0:
        refuse(op, "x without a dimension", "x is [..., D].")
    check_size(op, "rows of", x.shape[-1], 1, WIDEST)
    for name, parameter in parameters.items():
        check_shape(op, name, parameter, x.shape[-1:], "[D]")


def swiglu(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``.

    See :class:`anygauge_hooks.kernels.Swiglu`.

    :raises KernelInputError: The operator does not take this tensor.
    """
    check_dtypes("swiglu", gate_up=gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        refuse("swiglu", f"gate_up of shape {list(gate_up.shape)}", "Its last dimension is gate and up, 2 F.")
    if not gate_up.numel():
        return gate_up.chunk(2, dim=-1)[0]
    rows = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
    product: Tensor = torch.ops.npu.npu_swiglu(rows, dim=-1)
    return product.view(*gate_up.shape[:-1], -1)
