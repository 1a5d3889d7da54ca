"""Log-probability and entropy from logits, in the memory of the logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["vocab_parallel_logprob"]

CHUNK_ELEMENTS = 1 << 19
"""Logits handled at a time. Two float32 buffers of this size, 2 MiB each, stay in the processor's cache."""

LEAST_EXPONENT = -1e4
"""Stands for minus infinity where it would be multiplied by a probability of 0; its exponential is 0."""


def vocab_parallel_logprob(
    logits: Tensor, targets: Tensor, temperature: float, group: Any | None, *, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of the targets and the entropy, computed in float32.

    The logits are overwritten when a gradient is wanted, and backward returns their memory as the gradient;
    a second backward through the same graph is refused by autograd.

    See :class:`anygauge_hooks.kernels.VocabParallelLogprob`.
    """
    function = _LogProb if entropy_grad or logits.dtype != torch.float32 else _LogProbInPlace
    # torch leaves apply() untyped
    result: tuple[Tensor, Tensor] = function.apply(logits, targets, temperature, group, entropy_grad)  # type: ignore[no-untyped-call]
    return result


class _LogProbInPlace(torch.autograd.Function):
    """Float32 without a gradient of the entropy: forward leaves the probabilities where the logits were."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, group: Any | None, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies."""
        logits = logits.contiguous()
        column, present = _local_column(targets, logits.shape[1], group)
        chosen = _chosen(logits, column)
        statistics = _statistics(logits, temperature, overwrite=ctx.needs_input_grad[0])
        logprob, entropy, _, _, share = _combine(*statistics, chosen, present, temperature, group)
        ctx.save_for_backward(logits, column, present, logprob, share)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return ``grad (onehot - softmax) / temperature`` in the memory of the probabilities."""
        probabilities, column, present, logprob, share = ctx.saved_tensors
        grad = grads[0] / ctx.temperature
        probabilities.mul_((-grad * share).unsqueeze(1))
        # 1 - p of the target itself, without the cancellation
        _put(probabilities, column, present, -grad * torch.expm1(logprob))
        return probabilities, None, None, None, None


class _LogProb(torch.autograd.Function):
    """Any dtype, and the gradient of the entropy: backward computes the probabilities again."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, group: Any | None, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies."""
        logits = logits.contiguous()
        column, present = _local_column(targets, logits.shape[1], group)
        chosen = _chosen(logits, column)
        statistics = _statistics(logits, temperature, overwrite=False)
        logprob, entropy, base, total, _ = _combine(*statistics, chosen, present, temperature, group)
        ctx.save_for_backward(logits, column, present, logprob, entropy, base, total)
        ctx.temperature = temperature
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient of both outputs in the memory of the logits.

        With ``l = log softmax``: ``d logprob = onehot - exp(l)`` and ``d entropy = -exp(l) (l + entropy)``.
        """
        logits, column, present, logprob, entropy, base, total = ctx.saved_tensors
        grad, entropy_grad = (g / ctx.temperature for g in grads)
        for rows, log_softmax, softmax in _work(logits):
            torch.sub(logits[rows], base[rows, None], out=log_softmax)
            log_softmax.div_(ctx.temperature).sub_(total[rows, None]).clamp_(min=LEAST_EXPONENT)
            torch.exp(log_softmax, out=softmax)
            factor = log_softmax.add_(entropy[rows, None]).mul_(-entropy_grad[rows, None])
            logits[rows] = factor.sub_(grad[rows, None]).mul_(softmax)
        bounded = logprob.clamp(min=LEAST_EXPONENT)
        at_target = -torch.expm1(bounded) * grad - bounded.exp() * (bounded + entropy) * entropy_grad
        _put(logits, column, present, at_target)
        return logits, None, None, None, None


def _local_column(targets: Tensor, width: int, group: Any | None) -> tuple[Tensor, Tensor]:
    """Return the column of each target in this rank's logits, and whether it is there at all."""
    column = targets - width * (0 if group is None else dist.get_rank(group))
    return column.clamp(0, width - 1), (column >= 0) & (column < width)


def _chosen(logits: Tensor, column: Tensor) -> Tensor:
    return logits.gather(1, column.unsqueeze(1)).squeeze(1).float()


def _put(x: Tensor, column: Tensor, present: Tensor, value: Tensor) -> None:
    """Write ``value[t]`` to ``x[t, column[t]]`` where the column is this rank's."""
    index = column.unsqueeze(1)
    kept = x.gather(1, index)
    x.scatter_(1, index, torch.where(present.unsqueeze(1), value.unsqueeze(1).to(x.dtype), kept))


def _statistics(logits: Tensor, temperature: float, *, overwrite: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's statistics of each row.

    :param overwrite: Leave ``softmax(logits / temperature)`` in the logits.
    :returns: The largest logit; with ``z = (logits - largest) / temperature``, ``log sum exp z`` and the mean
        of ``z`` under its softmax; ``[T]`` each.
    """
    peak, largest, mean = torch.empty(3, logits.shape[0])
    for rows, shifted, softmax in _work(logits):
        chunk = logits[rows]
        peak[rows] = chunk.amax(1).clamp_(min=torch.finfo(logits.dtype).min)
        torch.sub(chunk, peak[rows, None], out=shifted)
        if temperature != 1:
            shifted.div_(temperature)
        mean[rows] = _softmax_mean(shifted, softmax)
        if mean[rows].isnan().any():  # 0 times minus infinity, or a logit that is no number and stays so
            torch.sub(chunk, peak[rows, None], out=shifted).div_(temperature).clamp_(min=LEAST_EXPONENT)
            mean[rows] = _softmax_mean(shifted, softmax)
        largest[rows] = softmax.amax(1)
        if overwrite:
            logits[rows] = softmax
    return peak, -largest.log(), mean


def _work(logits: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the chunks, each with two float32 buffers of its shape; the same memory every time."""
    count, width = logits.shape
    step = max(1, min(count, CHUNK_ELEMENTS // max(1, width)))
    first, second = torch.empty(2, step, width)
    for start in range(0, count, step):
        rows = min(step, count - start)
        yield slice(start, start + rows), first[:rows], second[:rows]


def _softmax_mean(z: Tensor, softmax: Tensor) -> Tensor:
    """Write ``softmax(z)`` and return the mean of ``z`` under it; overwrites ``z``."""
    torch.softmax(z, 1, out=softmax)
    return z.mul_(softmax).sum(1)


def _combine(
    peak: Tensor,
    log_sum: Tensor,
    mean: Tensor,
    chosen: Tensor,
    present: Tensor,
    temperature: float,
    group: Any | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Combine the ranks' statistics in two collectives. Every difference is taken before it is scaled.

    :param chosen: The target's logit where ``present``, anything elsewhere.
    :returns: Log-probability, entropy, the largest logit of the vocabulary, ``log sum exp z`` over the
        vocabulary, and this rank's share of the probability mass; ``[T]`` each.
    """
    base = peak.clone()
    if group is not None:
        dist.all_reduce(base, dist.ReduceOp.MAX, group)
    # bounded, because a rank may have nothing but minus infinity, and 0 times infinity is no number
    offset = ((peak - base) / temperature).clamp_(min=LEAST_EXPONENT)
    weight = (offset + log_sum).exp_()
    target = ((chosen - base) / temperature).masked_fill_(~present, 0)
    sums = torch.stack((weight, weight * (mean + offset), target))
    if group is not None:
        dist.all_reduce(sums, group=group)
    total = sums[0].log()
    return sums[2] - total, total - sums[1] / sums[0], base, total, weight / sums[0]
