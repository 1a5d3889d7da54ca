"""Matrix products of experts by torch-npu's grouped operator, which has no gradient of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anygauge_npu.guards import check_dtypes, check_shape, check_size, dtype_name, refuse

__all__ = ["grouped_matmul"]

OP = "grouped_matmul"
EXPERTS = 1024
WIDEST = 65535
"""Widest inner dimension of each operand."""

ROWS, INNER = 0, 2
"""Axis that the groups divide: the rows of the first operand, or the dimension that is summed over. For Atlas
A2, torch-npu's documentation has the first alone; CANN's for aclnnGroupedMatmulV5, the operator that is
called, has both."""


def grouped_matmul(x: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Return ``x[i] @ weight[e].T`` for the tokens ``i`` of each expert ``e``.

    See :class:`anygauge_hooks.kernels.GroupedMatmul`.

    :param tokens_per_expert: ``[E]``, int64; sums to ``T``, which is looked at only where it is on the host.
    :raises KernelInputError: The operator does not take these tensors.
    """
    _check(x, weight, tokens_per_expert)
    # ends, not counts: a list of one count is refused
    ends = tokens_per_expert.to(x.device).cumsum(0)
    y: Tensor = _GroupedMatmul.apply(x, weight, ends)  # type: ignore[no-untyped-call]  # torch leaves it so
    return y


def _check(x: Tensor, weight: Tensor, counts: Tensor) -> None:
    check_dtypes(OP, x=x, weight=weight)
    check_shape(OP, "x", x, (None, None), "[T, K]")
    check_shape(OP, "weight", weight, (None, None, x.shape[1]), "[E, N, K]")
    check_shape(OP, "tokens_per_expert", counts, (len(weight),), "[E]")
    check_size(OP, "a number of experts of", len(weight), 1, EXPERTS)
    for what, size in (("K", x.shape[1]), ("N", weight.shape[1])):
        check_size(OP, f"{what} of", size, 1, WIDEST)
    if counts.dtype != torch.int64:
        refuse(OP, f"tokens_per_expert in {dtype_name(counts)}", "Give it in int64.")
    if counts.device.type == "cpu":
        given = counts.tolist()
        if min(given) < 0 or sum(given) != len(x):
            refuse(OP, f"tokens_per_expert {given}; x has {len(x)} tokens", "They sum to the tokens.")


class _GroupedMatmul(torch.autograd.Function):
    """One operator for the products, and one for each gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Return the products."""
        ctx.save_for_backward(x, weight, ends)
        return _products(x, weight.mT, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of ``x`` and ``weight``."""
        x, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        dx = _products(grad, weight, ends) if ctx.needs_input_grad[0] else None
        dweight = _outer(grad, x, ends) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


def _products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return ``x[i] @ weight[e]`` for the tokens ``i`` of each expert ``e``, ``[T, N]``."""
    if not len(x):
        return x.new_zeros(0, weight.shape[2])
    return _grouped(x.contiguous(), _dense(weight), ends, ROWS)


def _outer(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return ``grad[i].T @ x[i]`` over the tokens ``i`` of each expert, ``[E, N, K]``."""
    shape = len(ends), grad.shape[1], x.shape[1]
    if not len(x):
        return x.new_zeros(shape)
    # groups of no tokens are filled with zeros: EmptyTensorCompute in cann/ops-transformer's
    # gmm/grouped_matmul/op_kernel/grouped_matmul_vector.h; not verified on an NPU
    return _grouped(grad.t(), x.contiguous(), ends, INNER)


def _dense(weight: Tensor) -> Tensor:
    """Return weights ``[E, K, N]`` that are contiguous, or the transpose of what is."""
    return weight if weight.mT.is_contiguous() else weight.contiguous()


def _grouped(x: Tensor, weight: Tensor, ends: Tensor, axis: int) -> Tensor:
    """Return one tensor of all products. Groups are given by where they end."""
    product: Tensor = torch.ops.npu.npu_grouped_matmul(
        [x], [weight], group_list=ends, split_item=3, group_type=axis, group_list_type=0
    )[0]
    return product
