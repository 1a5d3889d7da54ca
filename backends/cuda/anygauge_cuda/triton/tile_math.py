"""The passes over a tile of logits in ``linear_logprob``, each in one kernel that reads the tile once.

A program has one row, so that it can write derivatives over the logits that it has read.

Whether logits are kept is a number, not a constant of the kernel: another kernel might add up in another
order, and log-probs would then depend on the memory that is free.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from anygauge_hooks.tiles import Kept, Slopes, Sums, Tile

__all__ = ["TritonTileMath"]

BLOCK = 2048
"""Logits of a row that a program has at a time, and that are kept as differences from one peak."""

WARPS = 4


@triton.jit(do_not_specialize=["keeps"])
def _summarize(
    logits: tl.tensor,
    kept: tl.tensor,
    references: tl.tensor,
    targets: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    means: tl.tensor,
    chosen: tl.tensor,
    stride: int,
    references_stride: int,
    width: int,
    first: int,
    count: int,
    scale: float,
    keeps: int,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a row to the peak, to the sums of ``exp z`` and of ``z exp z``, and to the logits of targets.

    :param kept: Gets each ``z`` in float16, or each logit in float32, if ``keeps`` is 1.
    :param references: Gets the peak of each block's ``z``.
    """
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
        place = kept + row * stride + start + column
        if kept.dtype.element_ty == tl.float32:
            tl.store(place, x, mask=here & (keeps > 0))
        else:  # bounded, because float16 ends at -65504, and 0 times infinity is no number
            tl.store(place, tl.maximum(z, -1e4).to(tl.float16), mask=here & (keeps > 0))
        tl.store(references + row * references_stride + start // BLOCK, joint)
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


@triton.jit(do_not_specialize=["is_kept"])
def _derive(
    logits: tl.tensor,
    kept: tl.tensor,
    references: tl.tensor,
    factor: tl.tensor,
    targets: tl.tensor,
    bases: tl.tensor,
    entropies: tl.tensor,
    totals: tl.tensor,
    slopes: tl.tensor,
    chosen: tl.tensor,
    stride: int,
    references_stride: int,
    factor_stride: int,
    width: int,
    first: int,
    count: int,
    scale: float,
    is_kept: int,
    HAS_SLOPE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Overwrite a row, which ``factor`` may narrow, with ``-exp(l) (total + slope (l + entropy))``.

    The row is that of ``kept`` if ``is_kept`` is 1, else that of ``logits``, rounded as if it had been kept.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    base = tl.load(bases + row)
    total = tl.load(totals + row)
    entropy = tl.load(entropies + row)
    slope = tl.load(slopes + row)
    for start in range(0, width, BLOCK):
        here = start + column < width
        place = row * stride + start + column
        x = tl.load(logits + place, mask=here & (is_kept == 0), other=0.0)
        from_kept = tl.load(kept + place, mask=here & (is_kept > 0), other=0.0)
        peak = tl.load(references + row * references_stride + start // BLOCK)
        tl.debug_barrier()  # what is written lies over what other threads read
        if kept.dtype.element_ty == tl.float32:
            log_softmax = (tl.where(is_kept > 0, from_kept, x) - base) * scale
        else:
            rounded = tl.maximum((x - peak) * scale, -1e4).to(tl.float16)
            z = tl.where(is_kept > 0, from_kept, rounded).to(tl.float32)
            log_softmax = z + (peak - base) * scale
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
    """``anygauge_hooks.tiles.KeepsLogits`` for float32 logits."""

    in_place = True

    def peaks(self, width: int) -> int:
        """Return the number of blocks of a row."""
        return -(-width // BLOCK)

    def summarize(self, tile: Tile, sums: Sums) -> None:
        """Bring the sums up to date, and keep what is to be kept."""
        height, width = tile.logits.shape
        kept = _kept(tile)
        if height:
            _summarize[(height,)](
                tile.logits,
                kept.logits,
                kept.peaks,
                tile.targets,
                sums.peak,
                sums.total,
                sums.mean,
                sums.chosen,
                tile.logits.stride(0),
                kept.peaks.stride(0),
                width,
                tile.first,
                tile.targets.shape[1],
                tile.scale,
                int(_is_kept(kept)),
                _padded(tile.targets.shape[1]),
                BLOCK,
                num_warps=WARPS,
            )

    def derive(self, tile: Tile, slopes: Slopes) -> Tensor:
        """Return the derivatives by the logits, over them or over what is kept of them."""
        kept = _kept(tile)
        source = kept.logits if _is_kept(kept) else tile.logits
        height, width = source.shape
        factor = source.view(tile.dtype)[:, :width]
        if height:
            _derive[(height,)](
                tile.logits,
                kept.logits,
                kept.peaks,
                factor,
                tile.targets,
                slopes.base,
                slopes.entropy,
                slopes.total,
                slopes.total if slopes.slope is None else slopes.slope,
                slopes.chosen,
                source.stride(0),
                kept.peaks.stride(0),
                factor.stride(0),
                width,
                tile.first,
                tile.targets.shape[1],
                tile.scale,
                int(_is_kept(kept)),
                slopes.slope is not None,
                _padded(tile.targets.shape[1]),
                BLOCK,
                num_warps=WARPS,
            )
        return factor


def _kept(tile: Tile) -> Kept:
    assert tile.kept is not None, "passes that are KeepsLogits get it"
    return tile.kept


def _is_kept(kept: Kept) -> bool:
    return kept.logits.shape[1] > 0


def _padded(count: int) -> int:
    """Return the next power of two."""
    padded: int = triton.next_power_of_2(max(1, count))
    return padded
