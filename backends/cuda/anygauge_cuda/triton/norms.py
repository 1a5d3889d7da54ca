"""RMS norm in one pass forward and one backward, for wide rows and for many short ones alike."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anygauge_cuda.guards import check_shape
from anygauge_cuda.triton import rows as gpu
from anygauge_cuda.triton.rows import rows_of, warps_for

__all__ = ["rms_norm"]

TILE = 4096
"""Numbers that a program has at a time, where rows are that short."""

EACH = 32
"""Of them per thread."""

PROGRAMS_PER_PROCESSOR = 4
"""Of the backward pass; each leaves one row of partial sums for the weight."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / rms(x) * weight``, computed in float32.

    :param x: ``[..., D]``, read where it is if its last dimension is contiguous.
    :param weight: ``[D]``.
    :param eps: Added to the mean square.
    :returns: ``[..., D]``, the dtype of ``x``.
    :raises KernelInputError: The weight has another size.
    """
    check_shape("rms_norm", "weight", weight, x.shape[-1:], "[D]")
    y: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return y


class _RmsNorm(torch.autograd.Function):
    """Nothing but the inputs is kept: backward has the whole row, and so its scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the normalised ``x``."""
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        rows, width = rows_of(x), x.shape[-1]
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        columns = triton.next_power_of_2(width)
        height = max(1, TILE // columns)
        _normalise[(triton.cdiv(rows.number, height),)](
            *rows, weight.contiguous(), y, eps, width, height, columns,
            num_warps=warps_for(height * columns, EACH),
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of ``x`` and ``weight``."""
        x, weight = ctx.saved_tensors
        rows, width = rows_of(x), x.shape[-1]
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        columns = triton.next_power_of_2(width)
        height = max(1, TILE // columns)
        programs = min(PROGRAMS_PER_PROCESSOR * gpu.processors(x.device), triton.cdiv(rows.number, height))
        parts = torch.empty(programs, width, device=x.device, dtype=torch.float32)
        _derive[(programs,)](
            *rows, weight.contiguous(), grads[0].contiguous(), dx, parts, ctx.eps, width, height, columns,
            num_warps=warps_for(height * columns, EACH),
        )  # fmt: skip
        return dx, parts.sum(0).to(weight.dtype), None


@triton.jit
def _normalise(
    x: tl.tensor,
    count: int,
    inner: int,
    outer_step: int,
    step: int,
    weight: tl.tensor,
    y: tl.tensor,
    eps: float,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Normalise some rows."""
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    here = (row < count) & (column < WIDTH)
    start = row // inner * outer_step + row % inner * step
    value = tl.load(x + start + column, mask=here, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / WIDTH + eps)
    tl.store(y + row * WIDTH + column, value * scale * gain, mask=here)


@triton.jit
def _derive(
    x: tl.tensor,
    count: int,
    inner: int,
    outer_step: int,
    step: int,
    weight: tl.tensor,
    grad: tl.tensor,
    dx: tl.tensor,
    parts: tl.tensor,
    eps: float,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Go over every so-manieth tile of rows: ``r (g w - x r mean(g w x r))``, and the sum of ``g x r``."""
    column = tl.arange(0, COLUMNS)[None, :]
    gain = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    total = tl.zeros((HEIGHT, COLUMNS), tl.float32)
    for first in range(tl.program_id(0) * HEIGHT, count, tl.num_programs(0) * HEIGHT):
        row = first + tl.arange(0, HEIGHT).to(tl.int64)[:, None]
        here = (row < count) & (column < WIDTH)
        start = row // inner * outer_step + row % inner * step
        value = tl.load(x + start + column, mask=here, other=0.0).to(tl.float32)
        slope = tl.load(grad + row * WIDTH + column, mask=here, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / WIDTH + eps)
        normed = value * scale
        total += slope * normed
        slope *= gain
        along = tl.sum(slope * normed, 1, keep_dims=True) / WIDTH
        tl.store(dx + row * WIDTH + column, scale * (slope - normed * along), mask=here)
    place = parts + tl.program_id(0) * WIDTH + tl.arange(0, COLUMNS)
    tl.store(place, tl.sum(total, 0), mask=tl.arange(0, COLUMNS) < WIDTH)
