"""Matrix products of experts whose groups end where the device says: the host never learns the counts.

The grid is as large as it may have to be: a tile may be short where an expert ends, which is once per expert.
A program looks in the ends for the expert whose tile it has, and does nothing where there is none.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anygauge_cuda.guards import check_shape

__all__ = ["grouped_matmul"]

SIDE = 128
"""Rows and columns of the result that a program has ..."""

LEAST_SIDE = 16
"""... but for rows, or a weight, that have fewer. No product in a kernel is smaller."""

WIDE_DEPTH, DEPTH = 64, 32
"""How much a program multiplies at once, with and without ``LARGE`` memory."""

LARGE = 160 << 10
"""Bytes of shared memory of GPUs for servers. The 100 KiB of others have no room for three wide tiles."""


def grouped_matmul(x: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Return ``x[i] @ weight[e].T`` for the tokens ``i`` of each expert ``e``, added up in float32.

    See :class:`anygauge_hooks.kernels.GroupedMatmul`.

    :raises KernelInputError: ``x`` and ``weight`` do not fit.
    """
    op = "grouped_matmul"
    check_shape(op, "x", x, (len(x), weight.shape[2]), "[T, K], with the K of the weight")
    check_shape(op, "tokens_per_expert", tokens_per_expert, weight.shape[:1], "[E]")
    ends = tokens_per_expert.to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)
    y: Tensor = _Grouped.apply(x, weight, ends)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return y


class _Grouped(torch.autograd.Function):
    """One kernel for all products, and one for each gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Return the products."""
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight, ends)
        return _by_rows(x, weight.mT, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of ``x`` and ``weight``."""
        x, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        dx = _by_rows(grad, weight, ends) if ctx.needs_input_grad[0] else None
        return dx, _by_experts(grad, x, ends) if ctx.needs_input_grad[1] else None, None


def _by_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return ``x[i] @ weight[e]``, ``[T, N]``.

    :param x: ``[T, K]``, contiguous.
    :param weight: ``[E, K, N]``, of any strides.
    """
    (rows, inner), outer = x.shape, weight.shape[2]
    y = x.new_empty(rows, outer)
    height, width, depth = _side(rows // max(1, len(ends))), _side(outer), _depth(x)
    tiles = triton.cdiv(rows, height) + len(ends)
    if y.numel():
        _rows[(tiles * triton.cdiv(outer, width),)](
            x, weight, y, ends, rows, inner, outer, *weight.stride(), len(ends),
            triton.next_power_of_2(len(ends)), height, width, depth, inner % depth == 0,
            num_warps=_warps(height, width), num_stages=_stages(x),
        )  # fmt: skip
    return y


def _by_experts(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return ``grad[rows of e].T @ x[rows of e]``, ``[E, N, K]``; both are contiguous."""
    outer, inner = grad.shape[1], x.shape[1]
    dweight = x.new_empty(len(ends), outer, inner)
    height, width, depth = _side(outer), _side(inner), _depth(x)
    tiles = triton.cdiv(outer, height) * triton.cdiv(inner, width)
    if dweight.numel():
        _experts[(tiles * len(ends),)](
            grad, x, dweight, ends, len(x), outer, inner, height, width, depth,
            num_warps=_warps(height, width), num_stages=_stages(x),
        )  # fmt: skip
    return dweight


def _side(size: int) -> int:
    side: int = triton.next_power_of_2(max(1, size))
    return min(SIDE, max(LEAST_SIDE, side))


def _warps(height: int, width: int) -> int:
    return 8 if height * width == SIDE**2 else 4


def _depth(x: Tensor) -> int:
    return WIDE_DEPTH if x.element_size() == 2 and _shared_memory(x.device) >= LARGE else DEPTH


def _stages(x: Tensor) -> int:
    return 3 if x.element_size() == 2 else 2


@lru_cache
def _shared_memory(device: torch.device) -> int:
    """Return how many bytes a program may have."""
    properties = torch.cuda.get_device_properties(device)
    size: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # not among its stubs
    return size


@triton.jit
def _rows(
    x: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    ends: tl.tensor,
    rows: int,
    inner: int,
    outer: int,
    expert_stride: int,
    inner_stride: int,
    outer_stride: int,
    experts: int,
    EXPERTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Multiply a tile of the rows of one expert with some columns of its weight."""
    across = tl.cdiv(outer, WIDTH)
    tile = tl.program_id(0) // across
    number = tl.arange(0, EXPERTS)
    there = number < experts
    end_of = tl.minimum(tl.load(ends + number, mask=there, other=0), rows)
    start_of = tl.minimum(tl.load(ends + number - 1, mask=there & (number > 0), other=0), rows)
    tiles = tl.where(there, (end_of - start_of + HEIGHT - 1) // HEIGHT, 0)
    after = tl.cumsum(tiles, 0)
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    if expert < experts:
        is_it = number == expert
        first = tl.sum(tl.where(is_it, start_of + (tile - after + tiles) * HEIGHT, 0), 0)
        end = tl.sum(tl.where(is_it, end_of, 0), 0)
        row = first + tl.arange(0, HEIGHT)
        column = tl.program_id(0) % across * WIDTH + tl.arange(0, WIDTH)
        depth = tl.arange(0, DEPTH)
        is_row, is_column = (row < end)[:, None], (column < outer)[None, :]
        left = x + row.to(tl.int64)[:, None] * inner + depth[None, :]
        right = weight + expert.to(tl.int64) * expert_stride
        right += depth[:, None] * inner_stride + column[None, :] * outer_stride
        total = tl.zeros((HEIGHT, WIDTH), tl.float32)
        for start in range(0, inner, DEPTH):
            if IS_EVEN:
                a = tl.load(left, mask=is_row, other=0.0)
                b = tl.load(right, mask=is_column, other=0.0)
            else:
                here = start + depth < inner
                a = tl.load(left, mask=is_row & here[None, :], other=0.0)
                b = tl.load(right, mask=is_column & here[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision="tf32x3")
            left += DEPTH
            right += DEPTH * inner_stride
        place = y + row.to(tl.int64)[:, None] * outer + column[None, :]
        tl.store(place, total, mask=is_row & is_column)


@triton.jit
def _experts(
    grad: tl.tensor,
    x: tl.tensor,
    dweight: tl.tensor,
    ends: tl.tensor,
    rows: int,
    outer: int,
    inner: int,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Add up a tile of the gradient of one expert's weight over its rows; zeros where it has none."""
    across = tl.cdiv(inner, WIDTH)
    tiles = tl.cdiv(outer, HEIGHT) * across
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.minimum(tl.load(ends + expert), rows)
    row = tile // across * HEIGHT + tl.arange(0, HEIGHT)
    column = tile % across * WIDTH + tl.arange(0, WIDTH)
    is_row, is_column = (row < outer)[:, None], (column < inner)[None, :]
    token = tl.arange(0, DEPTH)
    place = (start + token).to(tl.int64)
    left = grad + place[None, :] * outer + row[:, None]  # transposed where it is read
    right = x + place[:, None] * inner + column[None, :]
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for first in range(start, end, DEPTH):
        here = first + token < end
        a = tl.load(left, mask=is_row & here[None, :], other=0.0)
        b = tl.load(right, mask=is_column & here[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="tf32x3")
        left += DEPTH * outer
        right += DEPTH * inner
    place = dweight + expert.to(tl.int64) * outer * inner + row[:, None] * inner + column[None, :]
    tl.store(place, total, mask=is_row & is_column)
