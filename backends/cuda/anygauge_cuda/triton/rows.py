"""How a kernel finds the rows of a tensor, how many programs fill a GPU, and what they leave is added up."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["WARP", "Rows", "processors", "rows_of", "total", "warps_for"]

WARP = 32

SECTOR = 8
"""Numbers in float32 that are read together at least."""

PARTS = 512
"""Partial sums that a program has at a time."""


class Rows(NamedTuple):
    """Rows of contiguous numbers. Row ``i`` begins at ``i // inner * outer_step + i % inner * step``."""

    memory: Tensor
    number: int
    inner: int
    outer_step: int
    step: int


def rows_of(x: Tensor) -> Rows:
    """Return where the rows of a tensor are: copied only where two strides do not say it."""
    width = x.shape[-1]
    if not x.is_contiguous():
        leading = [pair for pair in zip(x.shape[:-1], x.stride(), strict=False) if pair[0] != 1]
        if x.stride(-1) == 1 and len(leading) in (1, 2):
            inner, step = leading[1] if len(leading) == 2 else (1, 0)
            return Rows(x, leading[0][0] * inner, inner, leading[0][1], step)
        x = x.contiguous()
    return Rows(x, x.numel() // max(1, width), 1, width, 0)


def warps_for(elements: int, each: int = 16) -> int:
    """Return how many warps a program of so many elements takes, ``each`` of them per thread."""
    warps: int = min(16, max(1, triton.next_power_of_2(elements) // (WARP * each)))
    return warps


@lru_cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has."""
    number: int = torch.cuda.get_device_properties(device).multi_processor_count
    return number


def total(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum ``[...]`` of what programs left, ``[N, ...]`` in float32, always in the same order."""
    result = torch.empty(parts.shape[1:], device=parts.device, dtype=dtype)
    height = min(PARTS, triton.next_power_of_2(max(1, len(parts))))
    _add_up[(triton.cdiv(result.numel(), SECTOR),)](
        parts, len(parts), result, result.numel(), height, SECTOR, num_warps=warps_for(height * SECTOR)
    )
    return result


@triton.jit
def _add_up(
    parts: tl.tensor,
    count: int,
    result: tl.tensor,
    size: int,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum a few columns."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums = tl.zeros((HEIGHT, COLUMNS), tl.float32)
    for first in range(0, count, HEIGHT):
        row = first + tl.arange(0, HEIGHT).to(tl.int64)[:, None]
        sums += tl.load(parts + row * size + column, mask=(row < count) & (column < size), other=0.0)
    tl.store(result + column, tl.sum(sums, 0, keep_dims=True), mask=column < size)
