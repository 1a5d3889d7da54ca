"""How a kernel finds the rows of a tensor, and how many programs fill a GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

__all__ = ["Rows", "processors", "rows_of", "warps_for"]

WARP = 32


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
