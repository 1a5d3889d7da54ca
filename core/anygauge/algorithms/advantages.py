"""Advantage estimators: from the rewards of one group to an advantage for each of its samples.

Shape suffix: G samples of a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["dr_grpo", "grpo", "rloo"]

NotNegative = Annotated[float, Field(ge=0)]


def grpo(rewards_G: Tensor, *, center: bool = True, scale: bool = True, eps: NotNegative = 1e-6) -> Tensor:
    """Return group-relative advantages, https://arxiv.org/abs/2402.03300 section 4.1.2.

    ``A_i = (r_i - mean(r)) / (std(r) + eps)`` with the sample (``G - 1``) standard deviation. Without
    ``scale`` it is the estimator of https://arxiv.org/abs/2503.20783 section 3.2.

    A group whose rewards are all equal, as every group of one is, ranks nothing: its advantages are exactly
    zero, unless both switches are off.

    :param rewards_G: ``[G]``, floating, finite.
    :param center: Subtract the group's mean.
    :param scale: Divide by the group's standard deviation.
    :param eps: Added to the standard deviation.
    :returns: ``[G]``, the dtype of ``rewards_G``.
    """
    if not center and not scale:
        return rewards_G.clone()
    # Compared, not computed: the rounding error of a mean, divided by eps, is a visible advantage.
    if bool((rewards_G == rewards_G[:1]).all()):
        return rewards_G.new_zeros(rewards_G.shape)
    advantages_G = rewards_G - rewards_G.mean() if center else rewards_G
    return advantages_G / (rewards_G.std() + eps) if scale else advantages_G


def dr_grpo(rewards_G: Tensor) -> Tensor:
    """Return rewards less their mean, https://arxiv.org/abs/2503.20783 section 3.2.

    ``A_i = r_i - mean(r)``. The paper's other half is ``algorithm.loss_aggregation = "constant_length"``.

    :param rewards_G: ``[G]``, floating, finite.
    :returns: ``[G]``, the dtype of ``rewards_G``.
    """
    return grpo(rewards_G, scale=False)


def rloo(rewards_G: Tensor) -> Tensor:
    """Return leave-one-out advantages, https://arxiv.org/abs/2402.14740 equation 6.

    ``A_i = r_i - mean(r_j, j != i)``, which is ``G / (G - 1)`` times the difference to the mean of all. A
    group whose rewards are all equal, as every group of one is, has advantages of exactly zero.

    :param rewards_G: ``[G]``, floating, finite.
    :returns: ``[G]``, the dtype of ``rewards_G``.
    """
    count = rewards_G.numel()
    return grpo(rewards_G, scale=False) * (count / max(count - 1, 1))
