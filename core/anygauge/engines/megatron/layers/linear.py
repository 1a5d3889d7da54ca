"""Linear layers whose backward pass adds the weight gradient to Megatron's main gradient.

Megatron's own do so with a kernel of Apex alone. These are its modules with another function under them, and
the same collectives, which run while the gradient of the weight is computed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from anygauge.engines.megatron.gradients import replace_first
from anygauge.engines.megatron.layers.recompute import recipe_of
from anygauge.kernels.main_grad import weight_gradient

__all__ = ["ColumnLinear", "RowLinear", "linear"]


class _MainGradientLinear:
    """Megatron's linears with another function under them."""

    weight: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        replace_first(self.weight)

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        **_: Any,
    ) -> Tensor:
        """Take the arguments of Megatron's function; those left out are of its output layer."""
        sum_over, gather_over = tp_group if allreduce_dgrad else None, tp_group if sequence_parallel else None
        product = linear(input, weight, sum_over, gather_over)
        return product if bias is None else product + bias


class ColumnLinear(_MainGradientLinear, ColumnParallelLinear):
    """A linear whose output is split."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # On one rank the function that would reduce the gradient of the input only hides where that is from.
        self.disable_grad_reduce: bool = self.disable_grad_reduce or self.tp_group.size() == 1


class RowLinear(_MainGradientLinear, RowParallelLinear):
    """A linear whose input is split."""


def linear(x: Tensor, weight: Tensor, sum_over: Any = None, gather_over: Any = None) -> Tensor:
    """Return ``x @ weight.T``.

    What ``x`` can be made from again is kept in its place, where somebody said so (:mod:`.recompute`).

    :param x: ``[T, ..., K]``.
    :param weight: ``[N, K]``. Where it has a ``main_grad``, the gradient is added to that.
    :param sum_over: The group over which the gradient of ``x`` is summed.
    :param gather_over: The group of sequence parallelism: ``x`` is this rank's part of the tokens.
    :returns: ``[T', ..., N]``, of all ranks' tokens.
    """
    recipe = recipe_of(x) if torch.is_grad_enabled() else None
    kept = recipe.tensors if recipe is not None else ()
    result: Tensor = _Linear.apply(
        x, weight, sum_over, gather_over, recipe and recipe.make, *(tensor.detach() for tensor in kept)
    )
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, sum_over: Any, gather_over: Any, make: Any, *kept: Tensor
    ) -> Tensor:
        """Return the product."""
        ctx.sum_over, ctx.gather_over, ctx.make = sum_over, gather_over, make
        if not weight.requires_grad:
            ctx.save_for_backward(weight)
        else:
            ctx.save_for_backward(weight, *((x,) if make is None else kept))
        if gather_over is not None:
            x = _gather(x, gather_over)[0]
        return _product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x`` and ``weight``; collectives run beside the products."""
        weight, *kept = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad, grad_x, grad_weight, work, gathered = grads[0], None, None, None, None
        if needs_weight:
            x = kept[0] if ctx.make is None else ctx.make(*kept)
            if ctx.gather_over is not None:
                x, gathered = _gather(x, ctx.gather_over, wait=False)
        if needs_x:
            grad_x = _product(grad, weight)
            # a gathered input and the gradient are sent in this order by every rank
            if gathered is not None:
                gathered.wait()
            grad_x, work = _reduce(grad_x, ctx.sum_over, ctx.gather_over)
        elif gathered is not None:
            gathered.wait()
        if needs_weight:
            grad_weight = weight_gradient(weight, grad.flatten(0, -2), x.flatten(0, -2))
        if work is not None:
            work.wait()
        return grad_x, grad_weight, *[None] * (len(ctx.needs_input_grad) - 2)


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """Return ``x @ matrix`` as one product, where ``torch.matmul`` may take a small one for each token.

    It does so where a dimension of size 1 has another stride than it expects.
    """
    return torch.mm(x.flatten(0, -2), matrix).view(*x.shape[:-1], matrix.shape[1])


def _gather(x: Tensor, group: Any, *, wait: bool = True) -> tuple[Tensor, Any]:
    """Return the tokens of all ranks, in memory that the next call uses again, and what to wait for."""
    shape = [x.shape[0] * group.size(), *x.shape[1:]]
    out = get_global_memory_buffer().get_tensor(shape, x.dtype, "mpu")
    return out, dist.all_gather_into_tensor(out, x.contiguous(), group=group, async_op=not wait)


def _reduce(grad: Tensor, sum_over: Any, scatter_over: Any) -> tuple[Tensor, Any]:
    """Start to sum a gradient over ranks, and return it with what to wait for."""
    if scatter_over is not None:
        own = grad.new_empty(grad.shape[0] // scatter_over.size(), *grad.shape[1:])
        return own, dist.reduce_scatter_tensor(own, grad.contiguous(), group=scatter_over, async_op=True)
    if sum_over is not None:
        grad = grad.contiguous()
        return grad, dist.all_reduce(grad, group=sum_over, async_op=True)
    return grad, None
