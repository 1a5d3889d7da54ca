"""Rotary embedding of queries and keys in one launch, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anygauge_cuda.guards import check_rope, check_shape
from anygauge_cuda.triton.rows import warps_for

__all__ = ["rotary_embedding"]

TILE = 2048
"""Pairs that a program has at a time."""

EACH = 16
"""Pairs per thread."""


def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions, computed in float32.

    See :class:`anygauge_hooks.kernels.RotaryEmbedding`.

    :param q: ``[T, H, D]``, read where it is if its last dimension is contiguous, as ``k`` is.
    :raises KernelInputError: The shapes do not fit.
    """
    check_shape("rotary_embedding", "k", k, (len(q), k.shape[1], q.shape[2]), "[T, K, D]")
    check_rope("rotary_embedding", cos, sin, *q.shape[::2])
    # torch leaves apply() untyped
    turned: tuple[Tensor, Tensor] = _Rotate.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]
    return turned


class _Rotate(torch.autograd.Function):
    """The gradient is turned back with the same kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotated queries and keys."""
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotate(q, k, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of queries and keys."""
        return *_rotate(grads[0], grads[1], *ctx.saved_tensors, back=True), None, None


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    turned = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    rotary, width = cos.shape[1], q.shape[2]
    columns = triton.next_power_of_2(max(1, rotary // 2))
    heads = [min(triton.next_power_of_2(x.shape[1]), max(1, TILE // columns)) for x in (q, k)]
    _rotate_token[(len(q),)](
        q, k, *turned, cos, sin, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        q.shape[1], k.shape[1], width, rotary, columns, triton.next_power_of_2(max(1, width - rotary)),
        *heads, back, num_warps=warps_for(max(heads) * columns, EACH),
    )  # fmt: skip
    return turned[0], turned[1]


@triton.jit
def _rotate_token(
    q: tl.tensor,
    k: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_step: int,
    q_head_step: int,
    k_step: int,
    k_head_step: int,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
    HEIGHT: tl.constexpr,
    KEY_HEIGHT: tl.constexpr,
    BACK: tl.constexpr,
):
    """Turn all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    here = column < ROTARY // 2
    angle = token * ROTARY + column
    cos_first = tl.load(cos + angle, mask=here, other=0.0)
    cos_second = tl.load(cos + angle + ROTARY // 2, mask=here, other=0.0)
    sin_first = tl.load(sin + angle, mask=here, other=0.0)
    sin_second = tl.load(sin + angle + ROTARY // 2, mask=here, other=0.0)
    if BACK:
        sin_first, sin_second = -sin_second, -sin_first
    _rotate_heads(
        q + token * q_step, q_out + token * HEADS * WIDTH, q_head_step,
        cos_first, cos_second, sin_first, sin_second,
        HEADS, WIDTH, ROTARY, COLUMNS, REST, HEIGHT,
    )  # fmt: skip
    _rotate_heads(
        k + token * k_step, k_out + token * KEY_HEADS * WIDTH, k_head_step,
        cos_first, cos_second, sin_first, sin_second,
        KEY_HEADS, WIDTH, ROTARY, COLUMNS, REST, KEY_HEIGHT,
    )  # fmt: skip


@triton.jit
def _rotate_heads(
    x: tl.tensor,
    out: tl.tensor,
    head_step: int,
    cos_first: tl.tensor,
    cos_second: tl.tensor,
    sin_first: tl.tensor,
    sin_second: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
    HEIGHT: tl.constexpr,
):
    """Turn ``(first, second)`` into ``(first cos - second sin, second cos + first sin)``."""
    column = tl.arange(0, COLUMNS)[None, :]
    rest = ROTARY + tl.arange(0, REST)[None, :]
    for lowest in range(0, HEADS, HEIGHT):
        head = lowest + tl.arange(0, HEIGHT)[:, None]
        here = (head < HEADS) & (column < ROTARY // 2)
        source = x + head * head_step
        target = out + head * WIDTH
        first = tl.load(source + column, mask=here, other=0.0).to(tl.float32)
        second = tl.load(source + column + ROTARY // 2, mask=here, other=0.0).to(tl.float32)
        tl.store(target + column, first * cos_first - second * sin_first, mask=here)
        tl.store(target + column + ROTARY // 2, second * cos_second + first * sin_second, mask=here)
        if ROTARY < WIDTH:
            kept = (head < HEADS) & (rest < WIDTH)
            tl.store(target + rest, tl.load(source + rest, mask=kept), mask=kept)
