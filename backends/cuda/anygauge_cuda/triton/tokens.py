"""The way of tokens to their experts and back, without a look of the host at who goes where.

Rows are numbered in two passes over the routing map: how many tokens of each tile every expert gets, and,
from the running sum of that, which row each copy is. Copies and sums then go token by token, so that a token
is read or written once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anygauge_cuda.guards import check_shape, refuse
from anygauge_cuda.triton.rows import warps_for

__all__ = ["token_permute", "token_unpermute"]

MAP_TILE = 4096
"""Places of the routing map that a program has."""

COLUMNS = 1024
"""Numbers of a token that a program has."""

EACH = 8


def token_permute(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, topk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a copy of each token for each of its experts, sorted by expert.

    See :class:`anygauge_hooks.kernels.TokenPermute`.

    :raises KernelInputError: The shapes do not fit.
    """
    op, (count, experts) = "token_permute", routing_map.shape
    check_shape(op, "tokens", tokens, (count, tokens.shape[1]), "[T, H]")
    check_shape(op, "probs", probs, (count, experts), "[T, E]")
    if routing_map.dtype != torch.bool or not 1 <= topk <= experts:
        given = f"a map in {routing_map.dtype} and {topk} of {experts} experts"
        refuse(op, given, "The map is of booleans, with as many experts at least.")
    routing_map = routing_map.contiguous()
    rows = _number(routing_map, topk)
    permuted: Tensor = _Spread.apply(tokens, rows)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    weights: Tensor = _Weights.apply(probs, routing_map, rows)  # type: ignore[no-untyped-call]  # as above
    return permuted, weights, rows


def token_unpermute(permuted: Tensor, rows: Tensor) -> Tensor:
    """Return ``sum_k permuted[rows[t, k]]`` for each token ``t``, summed in float32.

    See :class:`anygauge_hooks.kernels.TokenUnpermute`.

    :raises KernelInputError: The shapes do not fit.
    """
    check_shape("token_unpermute", "permuted", permuted, (rows.numel(), permuted.shape[1]), "[T K, H]")
    total: Tensor = _Collect.apply(permuted, rows.contiguous())  # type: ignore[no-untyped-call]  # as above
    return total


class _Spread(torch.autograd.Function):
    """Copy each token to its rows; the gradient is their sum."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: Tensor) -> Tensor:
        """Return the copies."""
        ctx.save_for_backward(rows)
        return _spread(tokens, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradients of the copies."""
        return _collect(grads[0], *ctx.saved_tensors), None


class _Collect(torch.autograd.Function):
    """Sum the rows of each token; the gradient is a copy for each."""

    @staticmethod
    def forward(ctx: Any, permuted: Tensor, rows: Tensor) -> Tensor:
        """Return the sums."""
        ctx.save_for_backward(rows)
        return _collect(permuted, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the copies of the gradient."""
        return _spread(grads[0], *ctx.saved_tensors), None


class _Weights(torch.autograd.Function):
    """Take the weights of what is chosen; the gradient is 0 for what is not."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, routing_map: Tensor, rows: Tensor) -> Tensor:
        """Return ``[T K]``."""
        ctx.save_for_backward(routing_map, rows)
        weights = probs.new_empty(rows.numel())
        _launch(_take, routing_map, rows.shape[1], probs.contiguous(), weights, rows)
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return ``[T, E]``."""
        routing_map, rows = ctx.saved_tensors
        slope = grads[0].new_empty(routing_map.shape)
        _launch(_put, routing_map, rows.shape[1], slope, grads[0].contiguous(), rows)
        return slope, None, None


def _number(routing_map: Tensor, topk: int) -> Tensor:
    """Return ``[T, K]``: experts one after the other, and the tokens of each in their order."""
    count, experts = routing_map.shape
    height = _height(experts)
    sums = torch.empty(experts, triton.cdiv(count, height), dtype=torch.int32, device=routing_map.device)
    _launch(_count, routing_map, topk, sums)
    ends = sums.view(-1).cumsum(0, dtype=torch.int32)
    rows = torch.zeros(count, topk, dtype=torch.int32, device=routing_map.device)
    _launch(_enumerate, routing_map, topk, ends, rows)
    return rows


def _height(experts: int) -> int:
    """Return how many tokens of the routing map a program has."""
    height: int = max(1, MAP_TILE // triton.next_power_of_2(experts))
    return height


def _launch(kernel: Any, routing_map: Tensor, topk: int, *others: Tensor) -> None:
    """Run a kernel over tiles of the routing map."""
    count, experts = routing_map.shape
    height = _height(experts)
    # booleans are bytes
    kernel[(triton.cdiv(count, height),)](
        routing_map.view(torch.uint8), *others, count, topk, experts, height,
        triton.next_power_of_2(experts), num_warps=8,
    )  # fmt: skip


def _spread(tokens: Tensor, rows: Tensor) -> Tensor:
    """Return ``[T K, H]``."""
    tokens = tokens.contiguous()
    copies = tokens.new_empty(rows.numel(), tokens.shape[1])
    _by_token(_copy, tokens, copies, rows)
    return copies


def _collect(permuted: Tensor, rows: Tensor) -> Tensor:
    """Return ``[T, H]``."""
    permuted = permuted.contiguous()
    sums = permuted.new_empty(len(rows), permuted.shape[1])
    _by_token(_add, permuted, sums, rows)
    return sums


def _by_token(kernel: Any, source: Tensor, target: Tensor, rows: Tensor) -> None:
    width = source.shape[1]
    columns = min(COLUMNS, triton.next_power_of_2(width))
    tiles = triton.cdiv(width, columns)
    kernel[(len(rows) * tiles,)](
        source, target, rows, width, rows.shape[1], columns, tiles, num_warps=warps_for(columns, EACH)
    )


@triton.jit
def _tile(chosen: tl.tensor, count: int, EXPERTS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return a tile of the map: tokens, places in the map, 1 for what is chosen, and what is inside."""
    token = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    expert = tl.arange(0, WIDTH)[None, :]
    here = (token < count) & (expert < EXPERTS)
    place = token * EXPERTS + expert
    return token, place, tl.load(chosen + place, mask=here, other=0).to(tl.int32), here


@triton.jit
def _rows_of(
    chosen: tl.tensor,
    rows: tl.tensor,
    count: int,
    TOPK: tl.constexpr,
    EXPERTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return a tile's places in the map, the rows of what is chosen, whether it is, and what is inside."""
    token, place, is_chosen, here = _tile(chosen, count, EXPERTS, HEIGHT, WIDTH)
    copy = tl.cumsum(is_chosen, 1) - is_chosen
    row = tl.load(rows + token * TOPK + copy, mask=is_chosen > 0, other=0)
    return place, row, is_chosen > 0, here


@triton.jit
def _count(
    chosen: tl.tensor,
    sums: tl.tensor,
    count: int,
    TOPK: tl.constexpr,
    EXPERTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Count the tokens that each expert gets of a tile."""
    _, _, is_chosen, _ = _tile(chosen, count, EXPERTS, HEIGHT, WIDTH)
    expert, total = tl.arange(0, WIDTH), tl.sum(is_chosen, 0)
    tl.store(sums + expert * tl.num_programs(0) + tl.program_id(0), total, mask=expert < EXPERTS)


@triton.jit
def _enumerate(
    chosen: tl.tensor,
    ends: tl.tensor,
    rows: tl.tensor,
    count: int,
    TOPK: tl.constexpr,
    EXPERTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write which rows the copies of a tile's tokens are."""
    token, _, is_chosen, _ = _tile(chosen, count, EXPERTS, HEIGHT, WIDTH)
    expert = tl.arange(0, WIDTH)
    end = tl.load(ends + expert * tl.num_programs(0) + tl.program_id(0), mask=expert < EXPERTS, other=0)
    start = (end - tl.sum(is_chosen, 0))[None, :]
    row = start + tl.cumsum(is_chosen, 0) - is_chosen
    place = tl.cumsum(is_chosen, 1) - is_chosen
    tl.store(rows + token * TOPK + place, row, mask=(is_chosen > 0) & (place < TOPK))


@triton.jit
def _take(
    chosen: tl.tensor,
    probs: tl.tensor,
    weights: tl.tensor,
    rows: tl.tensor,
    count: int,
    TOPK: tl.constexpr,
    EXPERTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the weights of a tile's tokens to their rows."""
    place, row, is_chosen, _ = _rows_of(chosen, rows, count, TOPK, EXPERTS, HEIGHT, WIDTH)
    tl.store(weights + row, tl.load(probs + place, mask=is_chosen), mask=is_chosen)


@triton.jit
def _put(
    chosen: tl.tensor,
    slope: tl.tensor,
    grad: tl.tensor,
    rows: tl.tensor,
    count: int,
    TOPK: tl.constexpr,
    EXPERTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the gradients of the rows to where a tile's weights were, and 0 elsewhere."""
    place, row, is_chosen, here = _rows_of(chosen, rows, count, TOPK, EXPERTS, HEIGHT, WIDTH)
    tl.store(slope + place, tl.load(grad + row, mask=is_chosen, other=0.0), mask=here)


@triton.jit
def _copy(
    source: tl.tensor,
    target: tl.tensor,
    rows: tl.tensor,
    width: int,
    TOPK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Write a part of a token to each of its rows."""
    token = (tl.program_id(0) // TILES).to(tl.int64)
    column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    here = column < width
    value = tl.load(source + token * width + column, mask=here)
    for copy in tl.static_range(TOPK):
        row = tl.load(rows + token * TOPK + copy).to(tl.int64)
        tl.store(target + row * width + column, value, mask=here)


@triton.jit
def _add(
    source: tl.tensor,
    target: tl.tensor,
    rows: tl.tensor,
    width: int,
    TOPK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Add up a part of a token's rows in their order."""
    token = (tl.program_id(0) // TILES).to(tl.int64)
    column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    here = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for copy in tl.static_range(TOPK):
        row = tl.load(rows + token * TOPK + copy).to(tl.int64)
        total += tl.load(source + row * width + column, mask=here, other=0.0).to(tl.float32)
    tl.store(target + token * width + column, total, mask=here)
