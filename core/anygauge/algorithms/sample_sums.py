"""Sums over the tokens of a sample, in a micro-batch of whole samples.

A sample is never divided among micro-batches, and under context parallelism every rank has the log-probs of
whole responses before the loss sees them, so these are the same in one process and in many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anygauge_hooks.engines import LossInputs

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sample_mean_weights", "sample_means", "sample_sums"]


def sample_sums(values: Tensor, x: LossInputs) -> Tensor:
    """Return, for each token, the sum over the tokens of its sample that count.

    :param values: ``[T]``, finite also where the mask is 0.
    :returns: ``[T]``, the dtype of ``values``.
    """
    return _spread(values, x)[0]


def sample_means(values: Tensor, x: LossInputs) -> Tensor:
    """Return, for each token, the mean over the tokens of its sample that count; 0 where none does."""
    sums, counts = _spread(values, x)
    return sums / counts.clamp(min=1)


def sample_mean_weights(x: LossInputs) -> Tensor:
    """Return weights ``[T]`` that turn a sum over tokens into the sum of each sample's token mean.

    The shares themselves add up to the number of samples that have a token that counts.
    """
    return x.loss_mask / sample_sums(x.loss_mask.new_ones(x.loss_mask.shape), x).clamp(min=1)


def _spread(values: Tensor, x: LossInputs) -> tuple[Tensor, Tensor]:
    import torch

    assert sum(x.lengths) == len(values), "what concerns whole samples needs their lengths"
    lengths = torch.tensor(x.lengths, device=values.device, dtype=torch.int64)
    sample = torch.repeat_interleave(lengths, output_size=len(values))
    mask = x.loss_mask.to(values.dtype)
    counts = mask.new_zeros(len(lengths)).index_add(0, sample, mask)
    sums = values.new_zeros(len(lengths)).index_add(0, sample, values * mask)
    return sums[sample], counts[sample]
