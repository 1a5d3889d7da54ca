"""Loss aggregation: the weight of each token in the mean of an optimizer step, and a step's samples.

Both are decided on the driver over all samples, before they are divided among ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar, assert_never

__all__ = ["Aggregation", "split_steps", "token_weights"]

Aggregation = Literal["token_mean", "sample_mean", "constant_length"]

T = TypeVar("T")


def token_weights(
    loss_masks: Sequence[Sequence[int]],
    mode: Aggregation,
    max_length: int = 1,
    rollouts: Sequence[int | None] | None = None,
) -> list[list[float]]:
    """Return each token's share in the mean of one optimizer step. The shares add up to 1, or to less.

    :param loss_masks: Of every sample of the step; 1 where a token counts, else 0.
    :param mode: ``"token_mean"`` is the mean over all tokens, https://arxiv.org/abs/2503.14476 equation 12;
        ``"sample_mean"`` the mean over samples of each sample's token mean, https://arxiv.org/abs/2402.03300
        equation 3; ``"constant_length"`` the mean over samples of each sample's sum over ``max_length``,
        https://arxiv.org/abs/2503.20783 section 3.2, in which a token of a long response weighs no less. A
        sample without a token that counts is not among the samples.
    :param max_length: Most tokens that a response may have.
    :param rollouts: Of each sample, the number of the rollout that it is a part of, or ``None`` if it is one
        by itself. The parts of a rollout count as one sample, so that its weight does not depend on how many
        they are.
    :returns: The shapes of ``loss_masks``; all 0 if no token counts.
    """
    counts = [sum(mask) for mask in loss_masks]
    num_samples = sum(count > 0 for count in counts)
    if rollouts is not None and mode != "token_mean":  # whose weights do not depend on samples
        counts, num_samples = _of_rollouts(counts, rollouts)
    match mode:
        case "token_mean":
            denominators = [sum(counts)] * len(counts)
        case "sample_mean":
            denominators = [count * num_samples for count in counts]
        case "constant_length":
            denominators = [max_length * num_samples] * len(counts)
        case _:
            assert_never(mode)
    return [
        [value / denominator if denominator else 0.0 for value in mask]
        for mask, denominator in zip(loss_masks, denominators, strict=True)
    ]


def _of_rollouts(counts: Sequence[int], rollouts: Sequence[int | None]) -> tuple[list[int], int]:
    """Return for each sample how many tokens of its whole rollout count, and how many rollouts have any."""
    totals: dict[tuple[bool, int], int] = {}
    owners = [
        (False, place) if rollout is None else (True, rollout) for place, rollout in enumerate(rollouts)
    ]
    for owner, count in zip(owners, counts, strict=True):
        totals[owner] = totals.get(owner, 0) + count
    return [totals[owner] for owner in owners], sum(total > 0 for total in totals.values())


def split_steps(samples: Sequence[T], num_steps: int) -> list[list[T]]:
    """Divide a rollout among optimizer steps, so that each step sees every group.

    Step ``i`` takes every ``num_steps``-th sample from ``i`` on: with samples in the order of their groups, a
    group is spread over the steps as evenly as it can be, and the sizes of two steps differ by at most 1.

    :param samples: In the order of their groups.
    :param num_steps: At least 1.
    :returns: ``min(num_steps, len(samples))`` steps, none of them empty.
    """
    return [list(samples[step::num_steps]) for step in range(min(num_steps, len(samples)))]
