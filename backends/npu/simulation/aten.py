"""Host references of operators of torch that torch-npu has a kernel for and the host has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["OPERATORS", "gradients"]

OPERATORS: dict[str, Callable[..., Any]] = {}
"""Operators by qualified name, as ``aten::mm.dtype``; a name without an overload is for all of them."""

NUMBERED = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    15: torch.bfloat16,
}
"""Dtypes by torch's number of them."""

Function = Callable[..., Any]


def operator(*names: str) -> Callable[[Function], Function]:
    """Add a function to the table under the names of operators."""

    def add(function: Function) -> Function:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return add


def gradients(function: Function, inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the inputs, by torch's own rules."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        return torch.autograd.grad(function(*leaves), leaves, grad)


@operator("aten::matmul_backward")
def matmul_backward(
    grad: Tensor, x: Tensor, other: Tensor, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of both factors; torch-npu differentiates ``matmul`` as one operator."""
    dx, dother = gradients(torch.matmul, [x, other], grad)
    return dx if mask[0] else None, dother if mask[1] else None


@operator("npu::l1_loss_backward")
def l1_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Return the gradient of the input; torch-npu differentiates the loss as one operator."""
    names = ("none", "mean", "sum")

    def loss(value: Tensor) -> Tensor:
        return torch.nn.functional.l1_loss(value, target, reduction=names[reduction])

    return gradients(loss, [x], grad)[0]


@operator("aten::mm.dtype", "aten::bmm.dtype", "aten::mm.dtype_out", "aten::bmm.dtype_out")
def matmul_to(x: Tensor, other: Tensor, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Multiply with sums in the dtype of the result."""
    return _written(torch.matmul(x.to(dtype), other.to(dtype)), out)


@operator("aten::addmm.dtype", "aten::baddbmm.dtype", "aten::addmm.dtype_out", "aten::baddbmm.dtype_out")
def add_matmul_to(
    x: Tensor,
    first: Tensor,
    second: Tensor,
    dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply and add with sums in the dtype of the result."""
    add = torch.addmm if first.dim() == 2 else torch.baddbmm
    return _written(add(x.to(dtype), first.to(dtype), second.to(dtype), beta=beta, alpha=alpha), out)


def _written(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


@operator("npu::kl_div_backward")
def kl_div_backward(
    grad: Tensor, x: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False
) -> Tensor:
    """Return the gradient of the input; torch-npu differentiates the divergence as one operator."""

    def divergence(value: Tensor) -> Tensor:
        return torch.ops.aten.kl_div(value, target, reduction, log_target=log_target)

    return gradients(divergence, [x], grad)[0]


@operator("npu::kl_div_target_backward")
def kl_div_target_backward(
    grad: Tensor, x: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False
) -> Tensor:
    """Return the gradient of the target."""

    def divergence(value: Tensor) -> Tensor:
        return torch.ops.aten.kl_div(x, value, reduction, log_target=log_target)

    return gradients(divergence, [target], grad)[0]


@operator("npu::npu_binary_cross_entropy_with_logits_backward")
def binary_cross_entropy_with_logits_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: int
) -> Tensor:
    """Return the gradient of the logits; torch-npu differentiates the loss as one operator."""

    def loss(value: Tensor) -> Tensor:
        return torch.ops.aten.binary_cross_entropy_with_logits(value, target, weight, pos_weight, reduction)

    return gradients(loss, [x], grad)[0]


@operator("npu::repeat_interleave_backward_int")
def repeat_interleave_backward(grad: Tensor, x: Tensor, repeats: int, dim: int | None = None) -> Tensor:
    """Return the gradient of what was repeated; torch-npu differentiates it as one operator."""
    return gradients(lambda value: value.repeat_interleave(int(repeats), dim), [x], grad)[0]


@operator("npu::repeat_interleave_backward_tensor")
def repeat_interleave_backward_tensor(
    grad: Tensor, x: Tensor, repeats: Tensor, dim: int | None = None
) -> Tensor:
    """Return the gradient of what was repeated; torch-npu differentiates it as one operator."""
    return gradients(lambda value: value.repeat_interleave(repeats, dim), [x], grad)[0]


@operator("npu::_npu_dtype_cast")
def dtype_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast; a tensor of this dtype already is copied."""
    return x.to(dtype, copy=True)


@operator("npu::npu_dtype_cast")
def dtype_cast_by_number(x: Tensor, dtype: int, input_dtype: int | None = None) -> Tensor:
    """Cast to a dtype by torch's number of it."""
    assert input_dtype is None, "dtypes that torch does not have are not simulated"
    return x.to(NUMBERED[dtype], copy=True)


@operator("npu::npu_dtype_cast_backward", "npu::_npu_dtype_cast_backward")
def dtype_cast_backward(grad: Tensor, dtype: torch.dtype, *_: int | None) -> Tensor:
    """Cast the gradient back."""
    return grad.to(dtype, copy=True)


@operator("npu::npu_format_cast")
def format_cast(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Copy: formats of the device are not simulated, all is contiguous rows."""
    return x.clone()


@operator("npu::npu_format_cast_")
def format_cast_(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Do nothing: formats of the device are not simulated."""
    return x
