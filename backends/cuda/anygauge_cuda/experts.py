"""Matrix products of experts by torch's grouped product, whose groups end where the device says."""

from __future__ import annotations

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


def has_grouped() -> bool:
    """Return whether the GPU of this process is one whose kernel is used, as of a host without any."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == GROUPED_CAPABILITY


def grouped_matmul(x: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Return ``x[i] @ weight[e].T`` for the tokens ``i`` of each expert ``e``.

    The host never waits for the counts, which may be on either side. Where a size of the weight does not
    divide by 8, our own kernel computes it.

    See :class:`anygauge_hooks.kernels.GroupedMatmul`.
    """
    is_aligned = not any(size % ALIGNED for size in weight.shape[1:])
    if not len(x) or not is_aligned:
        from anygauge_cuda.triton import grouped

        return grouped.grouped_matmul(x, weight, tokens_per_expert)
    ends = tokens_per_expert.to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)
    y: Tensor = _Grouped.apply(x, weight, ends)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return y


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
