"""Gated linear unit in one pass forward and one backward, which keeps nothing but the input."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anygauge_cuda.guards import refuse
from anygauge_cuda.triton.rows import rows_of, warps_for

__all__ = ["swiglu"]

TILE = 1024
"""Columns that a program has of a row."""

EACH = 8
"""Columns of a thread: 16 bytes of bfloat16."""


def swiglu(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, computed in float32.

    See :class:`anygauge_hooks.kernels.Swiglu`.

    :param gate_up: ``[..., 2 F]``, read where it is if its last dimension is contiguous.
    :raises KernelInputError: The last dimension is odd.
    """
    if gate_up.shape[-1] % 2:
        refuse("swiglu", f"rows of {gate_up.shape[-1]}", "They are gate and up, 2 F.")
    y: Tensor = _Swiglu.apply(gate_up)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return y


class _Swiglu(torch.autograd.Function):
    """One pass over gate and up, and one over these and the gradient."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        """Return ``[..., F]``."""
        ctx.save_for_backward(gate_up)
        y = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        _launch(_gate, gate_up, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return ``[..., 2 F]``."""
        (gate_up,) = ctx.saved_tensors
        slope = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        _launch(_derive, gate_up, grads[0].contiguous(), slope)
        return slope


def _launch(kernel: Any, gate_up: Tensor, *others: Tensor) -> None:
    width = gate_up.shape[-1] // 2
    rows, tile = rows_of(gate_up), min(TILE, triton.next_power_of_2(max(1, width)))
    tiles = triton.cdiv(width, tile)
    warps = warps_for(tile, EACH)
    kernel[(rows.number * tiles,)](*rows, *others, width, tile, tiles, num_warps=warps)


@triton.jit
def _gate(
    x: tl.tensor,
    count: int,
    inner: int,
    outer_step: int,
    step: int,
    y: tl.tensor,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Gate a part of a row."""
    row = (tl.program_id(0) // TILES).to(tl.int64)
    column = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    here = column < WIDTH
    source = x + row // inner * outer_step + row % inner * step + column
    gate = tl.load(source, mask=here, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=here, other=0.0).to(tl.float32)
    tl.store(y + row * WIDTH + column, gate * tl.sigmoid(gate) * up, mask=here)


@triton.jit
def _derive(
    x: tl.tensor,
    count: int,
    inner: int,
    outer_step: int,
    step: int,
    grad: tl.tensor,
    slope: tl.tensor,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Gradients of a row: ``s = sigmoid(gate)``, ``g up s (1 + gate (1 - s))`` and ``g gate s``."""
    row = (tl.program_id(0) // TILES).to(tl.int64)
    column = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    here = column < WIDTH
    source = x + row // inner * outer_step + row % inner * step + column
    gate = tl.load(source, mask=here, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=here, other=0.0).to(tl.float32)
    given = tl.load(grad + row * WIDTH + column, mask=here, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    target = slope + row * 2 * WIDTH + column
    tl.store(target, given * up * share * (1 + gate * (1 - share)), mask=here)
    tl.store(target + WIDTH, given * gate * share, mask=here)
