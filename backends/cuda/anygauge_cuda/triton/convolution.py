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
from anygauge_cuda.triton.rows import total

__all__ = ["causal_conv1d"]

COLUMNS, WARPS = 256, 2
"""Channels that a program has, and its warps: a thread goes through the tokens of a few channels alone."""

AHEAD = 4
"""Tokens that are read at once."""

FORWARD, BACKWARD = 64, 128
"""Tokens that a program goes through."""


def causal_conv1d(x: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return ``silu(sum_w weight[c, w] * x[t - W + 1 + w, c])`` within each sequence, computed in float32.

    See :class:`anygauge_hooks.kernels.CausalConv1d`.

    :param x: ``[T, C]``, read where it is if its last dimension is contiguous.
    :raises KernelInputError: The shapes do not fit.
    """
    check_shape("causal_conv1d", "weight", weight, (x.shape[1], weight.shape[1]), "[C, W]")
    check_lengths("causal_conv1d", lengths, len(x))
    places = _places(tuple(lengths), x.device)
    # torch leaves apply() untyped
    y: Tensor = _Convolve.apply(x, weight, places)  # type: ignore[no-untyped-call]
    return y


@lru_cache(maxsize=4)  # every layer of a micro-batch asks for the same
@torch.inference_mode(mode=False)  # a later pass may keep it for its gradient
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
        (tokens, channels), width = x.shape, weight.shape[1]
        _convolve[triton.cdiv(channels, COLUMNS), triton.cdiv(tokens, FORWARD)](
            x, x.stride(0), weight.contiguous(), places, y, tokens,
            channels, width, FORWARD, AHEAD, COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of ``x`` and ``weight``."""
        x, weight, places = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        (tokens, channels), width = x.shape, weight.shape[1]
        length = triton.cdiv(max(BACKWARD, 2 * width), AHEAD) * AHEAD
        programs = triton.cdiv(tokens, length - width + 1)
        parts = torch.empty(programs, width, channels, device=x.device, dtype=torch.float32)
        _derive[triton.cdiv(channels, COLUMNS), programs](
            x, x.stride(0), weight.contiguous(), places, grads[0].contiguous(), dx, parts, tokens,
            channels, width, length, AHEAD, COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        return dx, total(parts, weight.dtype).t(), None


@triton.jit
def _read(
    source: tl.tensor,
    step: int,
    first: tl.tensor,
    end: tl.tensor,
    channel: tl.tensor,
    CHANNELS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Return a few tokens, all of them on their way before one is used."""
    values: tl.tuple = ()
    for i in tl.static_range(AHEAD):
        here = (channel < CHANNELS) & (first + i < end)
        values += (tl.load(source + (first + i) * step + channel, mask=here, other=0.0),)
    return values


@triton.jit
def _start(
    x: tl.tensor,
    step: int,
    weight: tl.tensor,
    places: tl.tensor,
    first: tl.tensor,
    channel: tl.tensor,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the taps and the tokens before the first one, the youngest first."""
    place = tl.load(places + first)
    taps: tl.tuple = ()
    history: tl.tuple = ()
    for back in tl.static_range(WIDTH):
        tap = tl.load(weight + channel * WIDTH + WIDTH - 1 - back, mask=channel < CHANNELS, other=0.0)
        taps += (tap.to(tl.float32),)
    for back in tl.static_range(1, WIDTH):
        here = (channel < CHANNELS) & (place >= back)
        value = tl.load(x + (first - back) * step + channel, mask=here, other=0.0)
        history += (value.to(tl.float32),)
    return taps, history


@triton.jit
def _sum(value: tl.tensor, history: tl.tuple, taps: tl.tuple, place: tl.tensor, WIDTH: tl.constexpr):
    """Return the sum for a token, before the activation, and the tokens that are in it."""
    value = value.to(tl.float32)
    window: tl.tuple = (value,)
    result = value * taps[0]
    for back in tl.static_range(1, WIDTH):
        # what was seen before a sequence began is forgotten
        window += (tl.where(place > 0, history[back - 1], 0.0),)
        result += window[back] * taps[back]
    return result, window


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
    LENGTH: tl.constexpr,
    AHEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Go through some tokens; what the next ones need of them is kept."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = channel < CHANNELS
    first = tl.program_id(1).to(tl.int64) * LENGTH
    end = tl.minimum(first + LENGTH, count)
    taps, history = _start(x, step, weight, places, first, channel, CHANNELS, WIDTH)
    following = _read(x, step, first, end, channel, CHANNELS, AHEAD)
    for turn in range(0, LENGTH, AHEAD):
        token = first + turn
        values = following
        following = _read(x, step, token + AHEAD, end, channel, CHANNELS, AHEAD)
        for i in tl.static_range(AHEAD):
            place = tl.load(places + token + i, mask=token + i < count, other=0)
            result, window = _sum(values[i], history, taps, place, WIDTH)
            history = window[: WIDTH - 1]
            target = y + (token + i) * CHANNELS + channel
            tl.store(target, result * tl.sigmoid(result), mask=is_channel & (token + i < count))


@triton.jit
def _derive(
    x: tl.tensor,
    step: int,
    weight: tl.tensor,
    places: tl.tensor,
    grad: tl.tensor,
    dx: tl.tensor,
    parts: tl.tensor,
    count: int,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    AHEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Go through some tokens; the gradient of one is whole when the last that saw it has been passed.

    The last ``WIDTH - 1`` are there for those before them only. The program after this one has them first.
    """
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = channel < CHANNELS
    first = tl.program_id(1).to(tl.int64) * (LENGTH - WIDTH + 1)
    end = tl.minimum(first + LENGTH, count)
    taps, history = _start(x, step, weight, places, first, channel, CHANNELS, WIDTH)
    nought = tl.zeros((COLUMNS,), tl.float32)
    sums: tl.tuple = (nought,)
    due: tl.tuple = ()
    for _ in tl.static_range(1, WIDTH):
        sums += (nought,)
        due += (nought,)
    next_values = _read(x, step, first, end, channel, CHANNELS, AHEAD)
    next_given = _read(grad, CHANNELS, first, end, channel, CHANNELS, AHEAD)
    for turn in range(0, LENGTH, AHEAD):
        token = first + turn
        values = next_values
        given = next_given
        next_values = _read(x, step, token + AHEAD, end, channel, CHANNELS, AHEAD)
        next_given = _read(grad, CHANNELS, token + AHEAD, end, channel, CHANNELS, AHEAD)
        for i in tl.static_range(AHEAD):
            place = tl.load(places + token + i, mask=token + i < count, other=0)
            result, window = _sum(values[i], history, taps, place, WIDTH)
            history = window[: WIDTH - 1]
            share = tl.sigmoid(result)
            slope = given[i].to(tl.float32) * share * (1 + result * (1 - share))
            local_slope = tl.where(turn + i < LENGTH - WIDTH + 1, slope, 0.0)
            added: tl.tuple = (sums[0] + local_slope * window[0],)
            whole: tl.tuple = (slope * taps[0],)
            for back in tl.static_range(1, WIDTH):
                added += (sums[back] + local_slope * window[back],)
                whole += (due[back - 1] + tl.where(place >= back, slope, 0.0) * taps[back],)
            sums = added
            due = whole[: WIDTH - 1]
            is_whole = (turn + i >= WIDTH - 1) & (token + i - WIDTH + 1 < count)
            target = dx + (token + i - WIDTH + 1) * CHANNELS + channel
            tl.store(target, whole[WIDTH - 1], mask=is_channel & is_whole)
    for back in tl.static_range(WIDTH):
        row = tl.program_id(1).to(tl.int64) * WIDTH + WIDTH - 1 - back
        tl.store(parts + row * CHANNELS + channel, sums[back], mask=is_channel)
