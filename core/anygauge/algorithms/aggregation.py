"""Loss aggregation: the weight of each token in the mean of an optimizer step, and a step's samples.

Both are decided on the driver over all samples, before they are divided among ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar, assert_never

import torch
from torch import Tensor

from anygauge.algorithms.scan import sample_of_token

__all__ = ["Aggregation", "split_steps", "token_weights"]

Aggregation = Literal["token_mean", "sample_mean", "constant_length"]

T = TypeVar("T")


def token_weights(
    mask_T: Tensor,
    lengths: Sequence[int],
    mode: Aggregation,
    max_length: int = 1,
    rollouts: Sequence[int] | None = None,
) -> Tensor:
    """Return each token's share in the mean of one optimizer step. The shares add up to 1, or to less.

    :param mask_T: ``[T]``, of every sample of the step; 1 where a token counts, else 0.
    :param lengths: Response tokens of each sample.
    :param mode: ``"token_mean"`` is the mean over all tokens, https://arxiv.org/abs/2503.14476 equation 12;
        ``"sample_mean"`` the mean over samples of each sample's token mean, https://arxiv.org/abs/2402.03300
        equation 3; ``"constant_length"`` the mean over samples of each sample's sum over ``max_length``,
        https://arxiv.org/abs/2503.20783 section 3.2, in which a token of a long response weighs no less. A
        sample without a token that counts is not among the samples.
    :param max_length: Most tokens that a response may have.
    :param rollouts: The rollout that each sample is a part of, ``None`` if each is one by itself. The parts
        of a rollout count as one sample, so that its weight does not depend on how many they are.
    :returns: ``[T]``, float64; all 0 if no token counts.
    """
    owners_N = torch.arange(len(lengths)) if rollouts is None else torch.tensor(rollouts)
    _, numbers_N = torch.unique(owners_N, return_inverse=True)
    owner_T = numbers_N[sample_of_token(lengths)]
    counts = torch.zeros(len(lengths), dtype=torch.int64).index_add_(0, owner_T, mask_T.long())
    num_samples = (counts > 0).sum()
    match mode:
        case "token_mean":
            denominators = counts.sum().expand(len(counts))
        case "sample_mean":
            denominators = counts * num_samples
        case "constant_length":
            denominators = (max_length * num_samples).expand(len(counts))
        case _:
            assert_never(mode)
    return mask_T.double() / denominators[owner_T].clamp(min=1)


def split_steps(samples: Sequence[T], num_steps: int) -> list[list[T]]:
    """Divide a rollout among optimizer steps, so that each step sees every group.

    Step ``i`` takes every ``num_steps``-th sample from ``i`` on: with samples in the order of their groups, a
    group is spread over the steps as evenly as it can be, and the sizes of two steps differ by at most 1.

    :param samples: In the order of their groups.
    :param num_steps: At least 1.
    :returns: ``min(num_steps, len(samples))`` steps, none of them empty.
    """
    return [list(samples[step::num_steps]) for step in range(min(num_steps, len(samples)))]
