"""Depthwise causal convolution over packed sequences; a token knows its place in its sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anygauge_cuda.guards import check_lengths, check_shape

__all__ = ["causal_conv1d"]

HEIGHT, COLUMNS = 16, 128
"""Tokens and channels that a program has."""

TURNS = 8
"""Tiles that a program goes through for the gradient of the weight, of which it leaves one partial sum."""

WARPS = 4


def causal_conv1d(x: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return ``silu(sum_w weight[c, w] * x[t - W + 1 + w, c])`` within each sequence, computed in float32.

    :param x: ``[T, C]``, read where it is if its last dimension is contiguous.
    :param weight: ``[C, W]``.
    :param lengths: Sum to ``T``.
    :returns: ``[T, C]``, the dtype of ``x``.
    :raises KernelInputError: The shapes do not fit.
    """
    check_shape("causal_conv1d", "weight", weight, (x.shape[1], weight.shape[1]), "[C, W]")
    check_lengths("causal_conv1d", lengths, len(x))
    places = _places(tuple(lengths), x.device)
    # torch leaves apply() untyped
    y: Tensor = _Convolve.apply(x, weight, places)  # type: ignore[no-untyped-call]
    return y


@lru_cache(maxsize=4)  # every layer of a micro-batch asks for the same
def _places(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the position of each token in its sequence."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    places = torch.arange(len(starts)) - starts
    return places.to(device, torch.int32)


class _Convolve(torch.autograd.Function):
    """Backward computes the sums again, and from their gradient those of the tokens and of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, places: Tensor) -> Tensor:
        """Return ``[T, C]``."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        ctx.save_for_backward(x, weight, places)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        _convolve[_grid(x)](
            x, x.stride(0), weight.contiguous(), places, y, *_sizes(x, weight), num_warps=WARPS
        )
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of ``x`` and ``weight``."""
        x, weight, places = ctx.saved_tensors
        weight_ = weight.contiguous()
        slope = torch.empty(x.shape, device=x.device, dtype=torch.float32)
        tiles, columns = _grid(x)
        programs = triton.cdiv(tiles, TURNS)
        parts = slope.new_empty(programs, weight.shape[1], len(weight))
        _derive_sums[(programs, columns)](
            x, x.stride(0), weight_, places, grads[0].contiguous(), slope, parts, *_sizes(x, weight),
            TURNS, triton.next_power_of_2(weight.shape[1]), num_warps=WARPS,
        )  # fmt: skip
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        _derive[_grid(x)](slope, weight_, places, dx, *_sizes(x, weight), num_warps=WARPS)
        return dx, parts.sum(0).t().to(weight.dtype), None


def _grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(len(x), HEIGHT), triton.cdiv(x.shape[1], COLUMNS)


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int, int, int]:
    return len(x), x.shape[1], weight.shape[1], HEIGHT, COLUMNS


@triton.jit
def _tile(number: tl.tensor, count: int, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a tile: its first token, its lines, its channels, which lines and which places are inside.

    Places in a tile are 32 bits wide, for which there are registers; only its start is not.
    """
    first = number.to(tl.int64) * HEIGHT
    line = tl.arange(0, HEIGHT)[:, None]
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    is_token = line < count - number * HEIGHT
    return first, line, channel, is_token, is_token & (channel < CHANNELS)


@triton.jit
def _sums(
    number: tl.tensor,
    x: tl.tensor,
    step: int,
    weight: tl.tensor,
    places: tl.tensor,
    count: int,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return a tile of the sums before the activation."""
    first, line, channel, is_token, here = _tile(number, count, CHANNELS, HEIGHT, COLUMNS)
    place = tl.load(places + first + line, mask=is_token, other=-1)
    total = tl.zeros((HEIGHT, COLUMNS), tl.float32)
    for back in tl.static_range(WIDTH):
        tap = tl.load(weight + channel * WIDTH + WIDTH - 1 - back, mask=channel < CHANNELS, other=0.0)
        source = x + first * step + (line - back) * step + channel
        value = tl.load(source, mask=here & (place >= back), other=0.0)
        total += value.to(tl.float32) * tap.to(tl.float32)
    return total


@triton.jit
def _convolve(
    x: tl.tensor,
    step: int,
    weight: tl.tensor,
    places: tl.tensor,
    y: tl.tensor,
    count: int,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Convolve a tile."""
    total = _sums(tl.program_id(0), x, step, weight, places, count, CHANNELS, WIDTH, HEIGHT, COLUMNS)
    first, line, channel, _, here = _tile(tl.program_id(0), count, CHANNELS, HEIGHT, COLUMNS)
    target = y + first * CHANNELS + line * CHANNELS + channel
    tl.store(target, total * tl.sigmoid(total), mask=here)


@triton.jit
def _derive_sums(
    x: tl.tensor,
    step: int,
    weight: tl.tensor,
    places: tl.tensor,
    grad: tl.tensor,
    slope: tl.tensor,
    parts: tl.tensor,
    count: int,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Write some tiles of the gradient of the sums, and what they give to that of the weight."""
    tap = tl.arange(0, TAPS)[:, None]
    gathered = tl.zeros((TAPS, COLUMNS), tl.float32)
    for turn in range(TURNS):
        number = tl.program_id(0) * TURNS + turn
        total = _sums(number, x, step, weight, places, count, CHANNELS, WIDTH, HEIGHT, COLUMNS)
        first, line, channel, is_token, here = _tile(number, count, CHANNELS, HEIGHT, COLUMNS)
        place = tl.load(places + first + line, mask=is_token, other=-1)
        start, inside = first * CHANNELS, line * CHANNELS + channel
        given = tl.load(grad + start + inside, mask=here, other=0.0).to(tl.float32)
        share = tl.sigmoid(total)
        given *= share * (1 + total * (1 - share))
        tl.store(slope + start + inside, given, mask=here)
        for back in tl.static_range(WIDTH):
            source = x + first * step + (line - back) * step + channel
            value = tl.load(source, mask=here & (place >= back), other=0.0)
            part = tl.sum(value.to(tl.float32) * given, 0, keep_dims=True)
            gathered += tl.where(tap == WIDTH - 1 - back, part, 0.0)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    target = parts + (tl.program_id(0).to(tl.int64) * WIDTH + tap) * CHANNELS + channel
    tl.store(target, gathered, mask=(tap < WIDTH) & (channel < CHANNELS))


@triton.jit
def _derive(
    slope: tl.tensor,
    weight: tl.tensor,
    places: tl.tensor,
    dx: tl.tensor,
    count: int,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write a tile of the gradient of the tokens: what the sums of the next ones of the sequence give."""
    first, line, channel, _, here = _tile(tl.program_id(0), count, CHANNELS, HEIGHT, COLUMNS)
    start, inside = first * CHANNELS, line * CHANNELS + channel
    total = tl.zeros((HEIGHT, COLUMNS), tl.float32)
    for ahead in tl.static_range(WIDTH):
        is_token = line < count - tl.program_id(0) * HEIGHT - ahead
        place = tl.load(places + first + ahead + line, mask=is_token, other=-1)
        tap = tl.load(weight + channel * WIDTH + WIDTH - 1 - ahead, mask=channel < CHANNELS, other=0.0)
        source = slope + start + ahead * CHANNELS + inside
        value = tl.load(source, mask=here & (place >= ahead), other=0.0)
        total += value * tap.to(tl.float32)
    tl.store(dx + start + inside, total, mask=here)
