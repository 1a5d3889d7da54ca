"""From a layer's projection to its attention: split, norms of queries and keys, rotation, in one pass."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anygauge_cuda.guards import check_rope, check_shape
from anygauge_cuda.triton import rows as gpu
from anygauge_cuda.triton.rows import total, warps_for

__all__ = ["qk_norm_rotary"]

TILE = 512
"""Numbers of a half of some heads that a program has at a time."""

PROGRAMS_PER_PROCESSOR = 8
"""Programs of the backward pass on a processor; each writes a row of partial sums for the weights."""


def qk_norm_rotary(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, normalized and rotated in float32, and values where they are.

    See :class:`anygauge_hooks.kernels.QkNormRotary`.

    :raises KernelInputError: The shapes do not fit.
    """
    op, width = "qk_norm_rotary", qkv.shape[-1]
    check_shape(op, "q_weight", q_weight, (width,), "[D]")
    check_shape(op, "k_weight", k_weight, (width,), "[D]")
    check_rope(op, cos, sin, len(qkv), width)
    # torch leaves apply() untyped
    split: tuple[Tensor, Tensor, Tensor] = _Split.apply(qkv, q_weight, k_weight, cos, sin, eps)  # type: ignore[no-untyped-call]
    return split


class _Split(torch.autograd.Function):
    """Nothing but the inputs is kept; the gradient of the projection is written in one piece."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values."""
        qkv, cos, sin = (x.contiguous() for x in (qkv, cos, sin))
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        ctx.eps = eps
        tokens, groups, slots, width = qkv.shape
        q = qkv.new_empty(tokens, groups * (slots - 2), width)
        k = qkv.new_empty(tokens, groups, width)
        if tokens:
            shape, warps = _shape(qkv, cos)
            weights = q_weight.contiguous(), k_weight.contiguous()
            _split[(tokens,)](qkv, q, k, *weights, cos, sin, eps, *shape, num_warps=warps)
        return q, k, qkv[:, :, -1].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the projection and of the weights."""
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        grad = torch.empty_like(qkv)
        programs = min(len(qkv), PROGRAMS_PER_PROCESSOR * gpu.processors(qkv.device))
        parts = torch.empty(programs, 2, qkv.shape[-1], device=qkv.device, dtype=torch.float32)
        if programs:
            shape, warps = _shape(qkv, cos)
            weights = q_weight.contiguous(), k_weight.contiguous()
            given = [x.contiguous() for x in grads]
            _join[(programs,)](
                qkv, *given, grad, parts, *weights, cos, sin, ctx.eps, len(qkv), *shape, num_warps=warps
            )
        sums = total(parts, q_weight.dtype)
        return grad, sums[0], sums[1], None, None, None


def _shape(qkv: Tensor, cos: Tensor) -> tuple[tuple[int, ...], int]:
    """Return the constants of both kernels, and the warps of a program."""
    _, groups, slots, width = qkv.shape
    rotary = cos.shape[1]
    columns = triton.next_power_of_2(max(1, rotary // 2))
    rest = triton.next_power_of_2(max(1, width - rotary))
    most = max(1, TILE // columns)
    heights = (min(triton.next_power_of_2(heads), most) for heads in (groups * (slots - 2), groups))
    shape = groups, slots, width, rotary, columns, rest, *heights
    return shape, warps_for(2 * shape[-2] * columns)


@triton.jit
def _rope_tables(
    cos: tl.tensor, sin: tl.tensor, token: tl.tensor, ROTARY: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return cosines and sines of both halves of a token."""
    column = tl.arange(0, COLUMNS)[None, :]
    here = column < ROTARY // 2
    at = token * ROTARY + column
    return (
        tl.load(cos + at, mask=here, other=0.0),
        tl.load(cos + at + ROTARY // 2, mask=here, other=0.0),
        tl.load(sin + at, mask=here, other=0.0),
        tl.load(sin + at + ROTARY // 2, mask=here, other=0.0),
    )


@triton.jit
def _load(
    source: tl.tensor,
    is_head: tl.tensor,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
):
    """Return both halves of what is rotated and what is not, in float32; 0 where there is nothing."""
    column = tl.arange(0, COLUMNS)[None, :]
    rest = tl.arange(0, REST)[None, :]
    here = is_head & (column < ROTARY // 2)
    first = tl.load(source + column, mask=here, other=0.0).to(tl.float32)
    second = tl.load(source + column + ROTARY // 2, mask=here, other=0.0).to(tl.float32)
    kept = tl.load(source + ROTARY + rest, mask=is_head & (rest < WIDTH - ROTARY), other=0.0).to(tl.float32)
    return first, second, kept


@triton.jit
def _store(
    target: tl.tensor,
    is_head: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    kept: tl.tensor,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
):
    """Write what :func:`_load` reads."""
    column = tl.arange(0, COLUMNS)[None, :]
    here = is_head & (column < ROTARY // 2)
    tl.store(target + column, first, mask=here)
    tl.store(target + column + ROTARY // 2, second, mask=here)
    if ROTARY < WIDTH:
        rest = tl.arange(0, REST)[None, :]
        tl.store(target + ROTARY + rest, kept, mask=is_head & (rest < WIDTH - ROTARY))


@triton.jit
def _split(
    qkv: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: float,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
    HEIGHT: tl.constexpr,
    KEY_HEIGHT: tl.constexpr,
):
    """Normalize and turn all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    source = qkv + token * GROUPS * SLOTS * WIDTH
    _split_heads(
        source, q, q_weight, cos, sin, eps, token,
        GROUPS * (SLOTS - 2), SLOTS - 2, 0, SLOTS, WIDTH, ROTARY, COLUMNS, REST, HEIGHT,
    )  # fmt: skip
    _split_heads(
        source, k, k_weight, cos, sin, eps, token,
        GROUPS, 1, SLOTS - 2, SLOTS, WIDTH, ROTARY, COLUMNS, REST, KEY_HEIGHT,
    )  # fmt: skip


@triton.jit
def _split_heads(
    source: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: float,
    token: tl.tensor,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    FIRST: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
    HEIGHT: tl.constexpr,
):
    """Do so with queries or with keys; ``HEADS`` of them begin at slot ``FIRST`` of each group."""
    c_first, c_second, s_first, s_second = _rope_tables(cos, sin, token, ROTARY, COLUMNS)
    every = tl.full((1, 1), 1, tl.int1)
    g_first, g_second, g_kept = _load(weight, every, WIDTH, ROTARY, COLUMNS, REST)
    for lowest in range(0, COUNT, HEIGHT):
        head = lowest + tl.arange(0, HEIGHT)[:, None]
        is_head = head < COUNT
        slot = head // HEADS * SLOTS + head % HEADS + FIRST
        first, second, kept = _load(source + slot * WIDTH, is_head, WIDTH, ROTARY, COLUMNS, REST)
        square = tl.sum(first * first + second * second, 1) + tl.sum(kept * kept, 1)
        scale = tl.rsqrt(square / WIDTH + eps)[:, None]
        first, second, kept = first * scale * g_first, second * scale * g_second, kept * scale * g_kept
        turned_first, turned_second = first * c_first - second * s_first, second * c_second + first * s_second
        target = out + (token * COUNT + head) * WIDTH
        _store(target, is_head, turned_first, turned_second, kept, WIDTH, ROTARY, COLUMNS, REST)


@triton.jit
def _join(
    qkv: tl.tensor,
    q_grad: tl.tensor,
    k_grad: tl.tensor,
    v_grad: tl.tensor,
    grad: tl.tensor,
    parts: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: float,
    tokens: int,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
    HEIGHT: tl.constexpr,
    KEY_HEIGHT: tl.constexpr,
):
    """Turn the gradients of some tokens back, take them through the norms, and put values beside them."""
    row = parts + tl.program_id(0) * 2 * WIDTH
    _join_heads(
        qkv, q_grad, grad, row, q_weight, cos, sin, eps, tokens,
        GROUPS * (SLOTS - 2), SLOTS - 2, 0, GROUPS, SLOTS, WIDTH, ROTARY, COLUMNS, REST, HEIGHT,
    )  # fmt: skip
    _join_heads(
        qkv, k_grad, grad, row + WIDTH, k_weight, cos, sin, eps, tokens,
        GROUPS, 1, SLOTS - 2, GROUPS, SLOTS, WIDTH, ROTARY, COLUMNS, REST, KEY_HEIGHT,
    )  # fmt: skip
    nought = tl.full((1, 1), 0, tl.int64)
    for number in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = nought + number
        for lowest in range(0, GROUPS, KEY_HEIGHT):
            head = lowest + tl.arange(0, KEY_HEIGHT)[:, None]
            source = v_grad + (token * GROUPS + head) * WIDTH
            target = grad + ((token * GROUPS + head) * SLOTS + SLOTS - 1) * WIDTH
            first, second, kept = _load(source, head < GROUPS, WIDTH, ROTARY, COLUMNS, REST)
            _store(target, head < GROUPS, first, second, kept, WIDTH, ROTARY, COLUMNS, REST)


@triton.jit
def _join_heads(
    qkv: tl.tensor,
    given: tl.tensor,
    grad: tl.tensor,
    part: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: float,
    tokens: int,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    FIRST: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
    HEIGHT: tl.constexpr,
):
    """Do so with the gradients of queries or of keys, and add up that of the weight."""
    every = tl.full((1, 1), 1, tl.int1)
    nought = tl.full((1, 1), 0, tl.int64)
    g_first, g_second, g_kept = _load(weight, every, WIDTH, ROTARY, COLUMNS, REST)
    w_first = tl.zeros((HEIGHT, COLUMNS), tl.float32)
    w_second = tl.zeros((HEIGHT, COLUMNS), tl.float32)
    w_kept = tl.zeros((HEIGHT, REST), tl.float32)
    for number in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = nought + number
        c_first, c_second, s_first, s_second = _rope_tables(cos, sin, token, ROTARY, COLUMNS)
        for lowest in range(0, COUNT, HEIGHT):
            head = lowest + tl.arange(0, HEIGHT)[:, None]
            is_head = head < COUNT
            slot = token * GROUPS * SLOTS + head // HEADS * SLOTS + head % HEADS + FIRST
            source = given + (token * COUNT + head) * WIDTH
            x_first, x_second, x_kept = _load(qkv + slot * WIDTH, is_head, WIDTH, ROTARY, COLUMNS, REST)
            y_first, y_second, y_kept = _load(source, is_head, WIDTH, ROTARY, COLUMNS, REST)
            square = tl.sum(x_first * x_first + x_second * x_second, 1) + tl.sum(x_kept * x_kept, 1)
            scale = tl.rsqrt(square / WIDTH + eps)[:, None]
            x_first, x_second, x_kept = x_first * scale, x_second * scale, x_kept * scale
            d_first = y_first * c_first + y_second * s_second
            d_second = y_second * c_second - y_first * s_first
            w_first += d_first * x_first
            w_second += d_second * x_second
            w_kept += y_kept * x_kept
            d_first, d_second, d_kept = d_first * g_first, d_second * g_second, y_kept * g_kept
            along = tl.sum(d_first * x_first + d_second * x_second, 1) + tl.sum(d_kept * x_kept, 1)
            along = (along / WIDTH)[:, None]
            first, second = (d_first - x_first * along) * scale, (d_second - x_second * along) * scale
            kept = (d_kept - x_kept * along) * scale
            _store(grad + slot * WIDTH, is_head, first, second, kept, WIDTH, ROTARY, COLUMNS, REST)
    # added up once: a sum over heads is one over warps
    sums = tl.sum(w_first, 0)[None, :], tl.sum(w_second, 0)[None, :], tl.sum(w_kept, 0)[None, :]
    _store(part, every, sums[0], sums[1], sums[2], WIDTH, ROTARY, COLUMNS, REST)
