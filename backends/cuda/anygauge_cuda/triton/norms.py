"""RMS norm in one pass forward and one backward, for wide rows and for many short ones alike."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anygauge_cuda.guards import check_shape
from anygauge_cuda.triton import rows as gpu
from anygauge_cuda.triton.rows import WARP, rows_of, total, warps_for

__all__ = ["add_rms_norm", "rms_norm"]

TILE = 4096
"""Numbers that a program has at a time, where rows are that short."""

EACH = 32
"""Numbers per thread."""

PIECES, PIECE_EACH = 5, 4
"""Pieces of a wide row in the backward pass: how many at most, and the numbers of each per thread. With 20
numbers of a row, and those of the next one being loaded, a thread has 128 registers."""

WARPS_PER_PROCESSOR = 16
"""Warps of the backward pass that fit on a processor with so many registers. Each program writes a row of
partial sums."""

MOST_WARPS = 32
"""Most warps of a program."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / rms(x) * weight``, computed in float32.

    See :class:`anygauge_hooks.kernels.RmsNorm`.

    :param x: ``[..., D]``, read where it is if its last dimension is contiguous.
    :raises KernelInputError: The weight has another size.
    """
    check_shape("rms_norm", "weight", weight, x.shape[-1:], "[D]")
    y: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return y


def add_rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``residual + x``, rounded, and the norm of that; their gradients become one where they meet.

    See :class:`anygauge_hooks.kernels.AddRmsNorm`.

    :raises KernelInputError: The shapes do not fit.
    """
    check_shape("add_rms_norm", "weight", weight, x.shape[-1:], "[D]")
    if residual is not None:
        check_shape("add_rms_norm", "residual", residual, x.shape, "[..., D]")
    # torch leaves apply() untyped
    outputs: tuple[Tensor, Tensor] = _AddRmsNorm.apply(x, weight, eps, residual)  # type: ignore[no-untyped-call]
    return outputs


class _RmsNorm(torch.autograd.Function):
    """Nothing but the inputs is kept: backward has the whole row, and so its scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the normalized ``x``."""
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of ``x`` and ``weight``."""
        x, weight = ctx.saved_tensors
        return *_gradients(x, weight, grads[0], ctx.eps), None


class _AddRmsNorm(torch.autograd.Function):
    """Fused residual add and RMS norm; keeps the weight and the sum for backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum and the norm of it."""
        sums = x.detach()
        if residual is not None:
            sums = torch.empty_like(x, memory_format=torch.contiguous_format)
        y = _norm(x, weight, eps, residual, sums)
        ctx.save_for_backward(x if residual is None else sums, weight)
        ctx.eps = eps
        return sums, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x`` and ``weight``; that of ``residual`` is the former."""
        x, weight = ctx.saved_tensors
        dx, dweight = _gradients(x, weight, grads[1], ctx.eps, around=grads[0])
        return dx, dweight, None, dx if ctx.needs_input_grad[3] else None


def _norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, sums: Tensor | None = None
) -> Tensor:
    """Return the norm of ``x``, or of what is written to ``sums`` if there is a residual."""
    rows, width = rows_of(x), x.shape[-1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    columns = triton.next_power_of_2(width)
    height = max(1, TILE // columns)
    adds = residual is not None
    # where nothing is added, y stands for the residual and the sums, which are not touched then
    _normalize[(triton.cdiv(rows.number, height),)](
        *rows, residual.contiguous() if residual is not None else y, sums if adds else y,
        weight.contiguous(), y, eps, width, height, columns, adds,
        num_warps=warps_for(height * columns, EACH),
    )  # fmt: skip
    return y


def _gradients(
    x: Tensor, weight: Tensor, grad: Tensor, eps: float, around: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``x`` and ``weight``.

    :param around: The gradient of what goes around the norm, to be added to that of ``x``.
    """
    rows, width = rows_of(x), x.shape[-1]
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    height, piece, warps = _shape(width)
    most = max(1, WARPS_PER_PROCESSOR // warps) * gpu.processors(x.device)
    programs = min(most, triton.cdiv(rows.number, height))
    parts = torch.empty(programs, width, device=x.device, dtype=torch.float32)
    grad = grad.contiguous()
    _derive[(programs,)](
        *rows, weight.contiguous(), grad, grad if around is None else around.contiguous(), dx, parts, eps,
        width, height, piece, around is not None, num_warps=warps,
    )  # fmt: skip
    return dx, total(parts, weight.dtype)


def _shape(width: int) -> tuple[int, int, int]:
    """Return how many rows a program has at a time, the size of the pieces it has them in, and its warps."""
    piece = triton.next_power_of_2(triton.cdiv(width, PIECES))
    if piece >= WARP * PIECE_EACH:
        return 1, piece, min(MOST_WARPS, piece // (WARP * PIECE_EACH))
    columns = triton.next_power_of_2(width)
    return TILE // columns, columns, warps_for(TILE, EACH)


@triton.jit
def _normalize(
    x: tl.tensor,
    count: int,
    inner: int,
    outer_step: int,
    step: int,
    residual: tl.tensor,
    sums: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    eps: float,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Normalize some rows, or their sums with a residual as they are written."""
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    here = (row < count) & (column < WIDTH)
    start = row // inner * outer_step + row % inner * step
    value = tl.load(x + start + column, mask=here, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + row * WIDTH + column, mask=here, other=0.0).to(tl.float32)
        value = value.to(sums.dtype.element_ty)
        tl.store(sums + row * WIDTH + column, value, mask=here)
        value = value.to(tl.float32)
    gain = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / WIDTH + eps)
    tl.store(y + row * WIDTH + column, value * scale * gain, mask=here)


@triton.jit
def _read(
    x: tl.tensor,
    count: int,
    inner: int,
    outer_step: int,
    step: int,
    grad: tl.tensor,
    first: tl.tensor,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Return the pieces of some rows, and of their gradients."""
    row = first + tl.arange(0, HEIGHT).to(tl.int64)[:, None]
    start = row // inner * outer_step + row % inner * step
    values: tl.tuple = ()
    slopes: tl.tuple = ()
    for lowest in tl.static_range(0, WIDTH, PIECE):
        column = lowest + tl.arange(0, PIECE)[None, :]
        here = (row < count) & (column < WIDTH)
        values += (tl.load(x + start + column, mask=here, other=0.0),)
        slopes += (tl.load(grad + row * WIDTH + column, mask=here, other=0.0),)
    return values, slopes


@triton.jit
def _derive(
    x: tl.tensor,
    count: int,
    inner: int,
    outer_step: int,
    step: int,
    weight: tl.tensor,
    grad: tl.tensor,
    around: tl.tensor,
    dx: tl.tensor,
    parts: tl.tensor,
    eps: float,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    PIECE: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Go over every so-manieth tile of rows: ``r (g w - x r mean(g w x r))``, and the sum of ``g x r``.

    What comes around the norm is added to the former. The next rows are on their way meanwhile.
    """
    nought = tl.zeros((HEIGHT, PIECE), tl.float32)
    gains: tl.tuple = ()
    totals: tl.tuple = ()
    for lowest in tl.static_range(0, WIDTH, PIECE):
        column = lowest + tl.arange(0, PIECE)[None, :]
        gains += (tl.load(weight + column, mask=column < WIDTH, other=0.0),)
        totals += (nought,)
    start, stride = tl.program_id(0) * HEIGHT, tl.num_programs(0) * HEIGHT
    next_values, next_slopes = _read(
        x, count, inner, outer_step, step, grad, start, WIDTH, HEIGHT, PIECE
    )  # fmt: skip
    for first in range(start, count, stride):
        values, slopes = next_values, next_slopes
        next_values, next_slopes = _read(
            x, count, inner, outer_step, step, grad, first + stride, WIDTH, HEIGHT, PIECE
        )  # fmt: skip
        row = first + tl.arange(0, HEIGHT).to(tl.int64)[:, None]
        past: tl.tuple = ()
        if ADDS:
            for lowest in tl.static_range(0, WIDTH, PIECE):
                column = lowest + tl.arange(0, PIECE)[None, :]
                here = (row < count) & (column < WIDTH)
                past += (tl.load(around + row * WIDTH + column, mask=here, other=0.0),)
        square, along = nought, nought
        for i in tl.static_range(len(gains)):
            value = values[i].to(tl.float32)
            square += value * value
            # in this order, so that no product is kept in registers for what comes below
            along += value * slopes[i].to(tl.float32) * gains[i].to(tl.float32)
        scale = tl.rsqrt(tl.sum(square, 1, keep_dims=True) / WIDTH + eps)
        mean = tl.sum(along, 1, keep_dims=True) * scale / WIDTH
        added: tl.tuple = ()
        for i in tl.static_range(len(gains)):
            normed = values[i].to(tl.float32) * scale
            slope = slopes[i].to(tl.float32)
            added += (totals[i] + slope * normed,)
            column = i * PIECE + tl.arange(0, PIECE)[None, :]
            result = scale * (slope * gains[i].to(tl.float32) - normed * mean)
            if ADDS:
                result += past[i].to(tl.float32)
            tl.store(dx + row * WIDTH + column, result, mask=(row < count) & (column < WIDTH))
        totals = added
    for i in tl.static_range(len(gains)):
        column = i * PIECE + tl.arange(0, PIECE)
        target = parts + tl.program_id(0) * WIDTH + column
        tl.store(target, tl.sum(totals[i], 0), mask=column < WIDTH)
