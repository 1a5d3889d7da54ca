"""The passes over a tile of logits in ``linear_logprob``, each in one kernel that reads the tile once.

A program has one row, so that it can write derivatives over the logits that it has read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from anygauge_hooks.tiles import Slopes, Sums, Tile

__all__ = ["TritonTileMath"]

BLOCK = 2048
"""Logits of a row that a program has at a time."""

WARPS = 4


@triton.jit
def _summarise(
    logits: tl.tensor,
    targets: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    means: tl.tensor,
    chosen: tl.tensor,
    stride: int,
    width: int,
    first: int,
    count: int,
    scale: float,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a row to the peak, to the sums of ``exp z`` and of ``z exp z``, and to the logits of targets."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    before = tl.load(peaks + row)
    peak = before
    total = tl.zeros([BLOCK], tl.float32)
    mean = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        here = start + column < width
        x = tl.load(logits + row * stride + start + column, mask=here, other=float("-inf"))
        joint = tl.maximum(peak, tl.max(x, 0))
        # bounded, because the first peak is no logit, and 0 times infinity is no number
        shift = tl.maximum((peak - joint) * scale, -1e4)
        factor = tl.exp(shift)
        z = (x - joint) * scale
        weight = tl.exp(z)
        mean = factor * (mean + shift * total) + tl.where(here, z, 0.0) * weight
        total = factor * total + weight
        peak = joint
    shift = tl.maximum((before - peak) * scale, -1e4)
    factor = tl.exp(shift)
    earlier = tl.load(totals + row)
    tl.store(means + row, factor * (tl.load(means + row) + shift * earlier) + tl.sum(mean, 0))
    tl.store(totals + row, factor * earlier + tl.sum(total, 0))
    tl.store(peaks + row, peak)
    index = tl.arange(0, COUNT)
    at = tl.load(targets + row * count + index, mask=index < count, other=-1) - first
    there = (index < count) & (at >= 0) & (at < width)
    tl.store(chosen + row * count + index, tl.load(logits + row * stride + at, mask=there), mask=there)


@triton.jit
def _derive(
    logits: tl.tensor,
    factor: tl.tensor,
    targets: tl.tensor,
    bases: tl.tensor,
    entropies: tl.tensor,
    totals: tl.tensor,
    slopes: tl.tensor,
    chosen: tl.tensor,
    stride: int,
    factor_stride: int,
    width: int,
    first: int,
    count: int,
    scale: float,
    HAS_SLOPE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Overwrite a row, which ``factor`` may narrow, with ``-exp(l) (total + slope (l + entropy))``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    base = tl.load(bases + row)
    total = tl.load(totals + row)
    entropy = tl.load(entropies + row)
    slope = tl.load(slopes + row)
    for start in range(0, width, BLOCK):
        here = start + column < width
        x = tl.load(logits + row * stride + start + column, mask=here, other=0.0)
        tl.debug_barrier()  # what is written lies over what other threads read
        log_softmax = (x - base) * scale
        level = total
        if HAS_SLOPE:
            level += slope * (log_softmax + entropy)
        tl.store(factor + row * factor_stride + start + column, -tl.exp(log_softmax) * level, mask=here)
    tl.debug_barrier()
    index = tl.arange(0, COUNT)
    at = tl.load(targets + row * count + index, mask=index < count, other=-1) - first
    there = (index < count) & (at >= 0) & (at < width)
    value = tl.load(chosen + row * count + index, mask=there)
    tl.store(factor + row * factor_stride + at, value, mask=there)


class TritonTileMath:
    """``anygauge_hooks.tiles.TileMath`` for float32 logits."""

    in_place = True

    def summarise(self, tile: Tile, sums: Sums) -> None:
        """Bring the sums up to date."""
        height, width = tile.logits.shape
        if height:
            _summarise[(height,)](
                tile.logits,
                tile.targets,
                sums.peak,
                sums.total,
                sums.mean,
                sums.chosen,
                tile.logits.stride(0),
                width,
                tile.first,
                tile.targets.shape[1],
                tile.scale,
                _padded(tile.targets.shape[1]),
                BLOCK,
                num_warps=WARPS,
            )

    def derive(self, tile: Tile, slopes: Slopes) -> Tensor:
        """Return the derivatives by the logits, over them."""
        height, width = tile.logits.shape
        factor = tile.logits.view(tile.dtype)[:, :width]
        if height:
            _derive[(height,)](
                tile.logits,
                factor,
                tile.targets,
                slopes.base,
                slopes.entropy,
                slopes.total,
                slopes.total if slopes.slope is None else slopes.slope,
                slopes.chosen,
                tile.logits.stride(0),
                factor.stride(0),
                width,
                tile.first,
                tile.targets.shape[1],
                tile.scale,
                slopes.slope is not None,
                _padded(tile.targets.shape[1]),
                BLOCK,
                num_warps=WARPS,
            )
        return factor


def _padded(count: int) -> int:
    """Return the next power of two."""
    padded: int = triton.next_power_of_2(max(1, count))
    return padded
