"""Matrix products of experts by torch's grouped product, whose groups end where the device says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["grouped_matmul"]

BYTES = 16
"""Alignment of addresses and strides that the operator takes."""

ALIGNED = BYTES // torch.bfloat16.itemsize
"""The same of the sizes of a weight."""

GROUPED_CAPABILITY = 9
"""First number of the compute capability whose kernel is used. On 8 and before the operator looks at every
group, and on 10 an expert without tokens gets a gradient that is not 0: pytorch/pytorch issue 172439."""


def grouped_matmul(x: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Return ``x[i] @ weight[e].T`` for the tokens ``i`` of each expert ``e``.

    In bfloat16 on Hopper the host never waits for the counts, which may be on either side. Elsewhere, or
    where a size of the weight does not divide by 8, there is a product for each expert and the host waits.

    See :class:`anygauge_hooks.kernels.GroupedMatmul`.
    """
    is_aligned = not any(size % ALIGNED for size in weight.shape[1:])
    if len(x) and is_aligned and _has_grouped(x.device, x.dtype):
        ends = tokens_per_expert.to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        y: Tensor = _Grouped.apply(x, weight, ends)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    else:
        counts = tuple(tokens_per_expert.tolist())
        y = _OneByOne.apply(x, weight, counts)  # type: ignore[no-untyped-call]  # as above
    return y


@lru_cache
def _has_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] == GROUPED_CAPABILITY


class _Grouped(torch.autograd.Function):
    """One operator for all products, and one for each gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Return the products."""
        x, weight = _aligned(x), _aligned(weight)
        ctx.save_for_backward(x, weight, ends)
        return F.grouped_mm(x, weight.mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of ``x`` and ``weight``."""
        x, weight, ends = ctx.saved_tensors
        grad = _aligned(grads[0])
        dx = F.grouped_mm(grad, weight, offs=ends) if ctx.needs_input_grad[0] else None
        dweight = F.grouped_mm(grad.t(), x, offs=ends) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


def _aligned(x: Tensor) -> Tensor:
    """Return a tensor whose memory is where the operator takes it, copied if need be.

    It looks at the strides of dimensions of size 1 too, which no other operator does.
    """
    dense = x.contiguous().view(-1).view(x.shape)
    return dense if dense.data_ptr() % BYTES == 0 else dense.clone()


class _OneByOne(torch.autograd.Function):
    """One product per expert, each into the rows of one result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        """Return the products."""
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        return _products(x, weight.mT, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of ``x`` and ``weight``."""
        x, weight = ctx.saved_tensors
        dx = _products(grads[0], weight, ctx.counts) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None
        dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for expert, rows in _rows(ctx.counts):
            torch.mm(grads[0][rows].T, x[rows], out=dweight[expert])
        return dx, dweight, None


def _products(x: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Return ``x[i] @ weight[e]`` for the tokens ``i`` of each expert ``e``."""
    y = x.new_empty(len(x), weight.shape[2])
    for expert, rows in _rows(counts):
        torch.mm(x[rows], weight[expert], out=y[rows])
    return y


def _rows(counts: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """Yield each expert and its rows."""
    start = 0
    for expert, count in enumerate(counts):
        yield expert, slice(start, start + count)
        start += count
