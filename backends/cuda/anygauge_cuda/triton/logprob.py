"""Log-probability and entropy from logits: each row is read once forward and once backward, in its memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from anygauge_cuda.guards import check_shape

__all__ = ["vocab_parallel_logprob"]

TILE = 8192
"""Logits of a row that a program has at a time."""

WARPS = 8

LEAST_EXPONENT = -1e4
"""Stands for minus infinity where it would be multiplied by a probability of 0; its exponential is 0."""


def vocab_parallel_logprob(
    logits: Tensor, targets: Tensor, temperature: float, group: Any | None, *, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of the targets and the entropy, computed in float32.

    Backward returns the memory of the logits as their gradient.

    See :class:`anygauge_hooks.kernels.VocabParallelLogprob`.

    :raises KernelInputError: There is not a target for each token.
    """
    check_shape("vocab_parallel_logprob", "targets", targets, logits.shape[:1], "[T]")
    # torch leaves apply() untyped
    result: tuple[Tensor, Tensor] = _LogProb.apply(  # type: ignore[no-untyped-call]
        logits, targets, 1 / temperature, group, entropy_grad
    )
    return result


class _LogProb(torch.autograd.Function):
    """Forward keeps the logits and numbers of each row."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, scale: float, group: Any | None, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies."""
        logits = logits.contiguous()
        height, width = logits.shape
        column = targets - width * (0 if group is None else dist.get_rank(group))
        numbers = torch.empty(4, height, device=logits.device, dtype=torch.float32)
        _summarize[(height,)](logits, column, *numbers, width, scale, TILE, num_warps=WARPS)
        logprob, entropy, base, log_total = _combine(numbers, scale, group)
        ctx.save_for_backward(logits, column, base, log_total, entropy)
        ctx.scale, ctx.has_slope = scale, entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient of both outputs in the memory of the logits.

        With ``l = log softmax``: ``d logprob = onehot - exp(l)`` and ``d entropy = -exp(l) (l + entropy)``.
        """
        logits, column, base, log_total, entropy = ctx.saved_tensors
        height, width = logits.shape
        tiles = triton.cdiv(width, TILE)
        level = grads[0].contiguous()
        slope = grads[1].contiguous() if ctx.has_slope else level
        _derive[(height * tiles,)](
            logits, column, base, log_total, entropy, level, slope,
            width, ctx.scale, ctx.has_slope, TILE, tiles, num_warps=WARPS,
        )  # fmt: skip
        increment_version(logits)  # so that autograd refuses to go back through the same graph again
        return logits, None, None, None, None


def _combine(numbers: Tensor, scale: float, group: Any | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Combine what the ranks know of each row, in two collectives.

    :param numbers: ``[4, T]``: the largest logit; with ``z = (logit - largest) * scale`` the sums of
        ``exp z`` and of ``z exp z``; the target's logit, or minus infinity where it is another rank's.
    :returns: Log-probability, entropy, the largest logit of the vocabulary, and ``log sum exp z`` over the
        vocabulary, ``[T]`` each.
    """
    peak, total, mean, chosen = numbers
    if group is None:
        log_total = total.log()
        logprob = ((chosen - peak) * scale).clamp_(min=LEAST_EXPONENT).sub_(log_total)
        return logprob, log_total - mean / total, peak, log_total
    base = peak.clone()
    dist.all_reduce(base, dist.ReduceOp.MAX, group)
    # bounded, because a rank may have nothing but minus infinity
    offset = ((peak - base) * scale).clamp_(min=LEAST_EXPONENT)
    weight = offset.exp()
    target = ((chosen - base) * scale).masked_fill_(chosen == -torch.inf, 0)
    sums = torch.stack((weight * total, weight * (mean + offset * total), target))
    dist.all_reduce(sums, group=group)
    log_total = sums[0].log()
    return sums[2] - log_total, log_total - sums[1] / sums[0], base, log_total


@triton.jit
def _summarize(
    logits: tl.tensor,
    columns: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    means: tl.tensor,
    chosen: tl.tensor,
    width: int,
    scale: float,
    TILE: tl.constexpr,
):
    """Reduce one row to its peak, the sums of ``exp z`` and ``z exp z``, and the target's logit."""
    # -1e30 is below every logit, and finite
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    peak, total, mean = -1e30, 0.0, 0.0
    for start in range(0, width, TILE):
        here = start + column < width
        x = tl.load(logits + row * width + start + column, mask=here, other=float("-inf")).to(tl.float32)
        joint = tl.maximum(peak, tl.max(x, 0))
        shift = (peak - joint) * scale
        factor = tl.exp(shift)
        z = tl.maximum((x - joint) * scale, -1e4, propagate_nan=tl.PropagateNan.ALL)
        weight = tl.exp(z)
        # shift is of the order of 1e30 before the first tile, where there is no total yet
        mean = factor * (mean + shift * total) + tl.sum(z * weight, 0)
        total = factor * total + tl.sum(weight, 0)
        peak = joint
    tl.store(peaks + row, peak)
    tl.store(totals + row, total)
    tl.store(means + row, mean)
    target = tl.load(columns + row)
    is_here = (target >= 0) & (target < width)
    logit = tl.load(logits + row * width + target, mask=is_here, other=float("-inf"))
    tl.store(chosen + row, logit.to(tl.float32))


@triton.jit
def _derive(
    logits: tl.tensor,
    columns: tl.tensor,
    bases: tl.tensor,
    log_totals: tl.tensor,
    entropies: tl.tensor,
    levels: tl.tensor,
    slopes: tl.tensor,
    width: int,
    scale: float,
    HAS_SLOPE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Put the gradient of a part of a row where its logits are."""
    row = (tl.program_id(0) // TILES).to(tl.int64)
    column = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    here = column < width
    place = logits + row * width + column
    x = tl.load(place, mask=here, other=float("-inf")).to(tl.float32)
    l = tl.maximum((x - tl.load(bases + row)) * scale, -1e4) - tl.load(log_totals + row)  # noqa: E741
    share = tl.exp(l)
    level = tl.load(levels + row) * scale
    is_target = column == tl.load(columns + row)
    value = -share * level
    # 1 - p without the cancellation: it is -expm1(l), and near l = 0 the first terms of its series do
    value = tl.where(is_target, level * _without(l, share), value)
    if HAS_SLOPE:
        value -= share * (l + tl.load(entropies + row)) * tl.load(slopes + row) * scale
    tl.store(place, value, mask=here)


@triton.jit
def _without(log_share: tl.tensor, share: tl.tensor):
    """Return ``1 - share``."""
    x = log_share
    series = -x * (1 + x * (0.5 + x * (1 / 6 + x * (1 / 24 + x / 120))))
    return tl.where(x > -0.1, series, 1 - share)
