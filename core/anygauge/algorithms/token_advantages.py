"""Token-level advantage estimators: from a rank's samples to ``[T]``.

Each is a function of :class:`~anygauge_hooks.algorithms.AdvantageInputs`. Tokens whose mask is 0, such as
what a tool answered, are passed over: the token after them follows the one before them. Shape suffixes: N
samples, T their response tokens end to end, C those that count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from anygauge.algorithms.scan import discounted_sums, last_tokens, sample_of_token
from anygauge.algorithms.whitening import whiten
from anygauge_hooks.algorithms import AdvantageInputs, TokenAdvantages

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "gae",
    "on_policy_distillation",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "token_rewards",
]

Discount = Annotated[float, Field(ge=0, le=1)]


def token_rewards(
    scores_N: Tensor,
    mask_T: Tensor,
    lengths: Sequence[int],
    *,
    kl_T: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """Return the score at the last token that counts, less a KL penalty at each that does.

    ``r_t = [t is last] R - kl_coef * KL_t``, https://arxiv.org/abs/2203.02155 equation 2, token by token.

    :param scores_N: ``[N]``.
    :param mask_T: ``[T]``, 1 where a token counts.
    :param lengths: Response tokens of each sample.
    :param kl_T: ``[T]``, an estimate of the KL divergence from the reference, in nats.
    :returns: ``[T]``; 0 where a token does not count.
    """
    import torch

    counts = mask_T != 0
    rewards_T = torch.zeros_like(mask_T)
    if kl_T is not None:
        rewards_T = torch.where(counts, -kl_coef * kl_T, rewards_T)
    counted = _counted(mask_T, lengths)
    rewards_T[counts.nonzero().squeeze(1)[last_tokens(counted)]] += scores_N[torch.tensor(counted) > 0]
    return rewards_T


def gae(inputs: AdvantageInputs, *, gamma: Discount = 1.0, lambd: Discount = 1.0) -> TokenAdvantages:
    """Return generalized advantages and returns, https://arxiv.org/abs/1506.02438 equation 16.

    ``A_t = delta_t + gamma * lambd * A_{t+1}`` with ``delta_t = r_t + gamma * V_{t+1} - V_t``; both are 0
    after the last token that counts. The returns are ``A_t + V_t``.

    :param inputs: With the critic's values.
    :param gamma: Discount of what comes one token later.
    :param lambd: Between one-step errors of the critic (0) and whole returns (1).
    """
    assert inputs.values is not None, "needs a critic"
    counts, counted = inputs.loss_mask != 0, _counted(inputs.loss_mask, inputs.lengths)
    values_C = inputs.values[counts]
    following_C = values_C.roll(-1)
    following_C[last_tokens(counted)] = 0.0
    delta_C = inputs.rewards[counts] + gamma * following_C - values_C
    advantages_C = discounted_sums(delta_C, gamma * lambd, counted)
    return TokenAdvantages(_spread(advantages_C, counts), _spread(advantages_C + values_C, counts))


def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: Discount = 1.0) -> TokenAdvantages:
    """Return whitened discounted returns, https://arxiv.org/abs/2501.03262 section 3.

    ``A_t = sum_{k >= t} gamma^(k - t) r_k``, whitened over the tokens of all ranks.

    :param gamma: Discount of what comes one token later.
    """
    counts, counted = inputs.loss_mask != 0, _counted(inputs.loss_mask, inputs.lengths)
    returns_C = discounted_sums(inputs.rewards[counts], gamma, counted)
    return TokenAdvantages(whiten(_spread(returns_C, counts), inputs.loss_mask, inputs.total))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> TokenAdvantages:
    """Return whitened rewards less their group's mean, https://arxiv.org/abs/2501.03262 section 3.

    ``A_t = R - mean(R of the group)``, whitened over the tokens of all ranks. Its KL term is in the loss.
    """
    centered_N = inputs.scores - inputs.baselines
    advantages_T = centered_N[sample_of_token(inputs.lengths)]
    return TokenAdvantages(whiten(advantages_T, inputs.loss_mask, inputs.total))


def on_policy_distillation(inputs: AdvantageInputs) -> TokenAdvantages:
    """Return teacher log-prob minus policy log-prob, per token, https://arxiv.org/abs/2306.13649 section 3.

    ``A_t = log teacher(x_t) - log policy(x_t)``: its mean is minus the KL divergence of the policy from the
    teacher, estimated from what the policy sampled, and the policy gradient with it follows the gradient of
    that. Rewards play no part.

    :param inputs: With the teacher's log-probabilities.
    """
    import torch

    assert inputs.teacher_log_probs is not None, "needs a teacher"
    assert inputs.log_probs is not None, "needs old log-probs"
    difference_T = inputs.teacher_log_probs - inputs.log_probs
    return TokenAdvantages(torch.where(inputs.loss_mask != 0, difference_T, torch.zeros_like(difference_T)))


def _counted(mask_T: Tensor, lengths: Sequence[int]) -> list[int]:
    """Return how many tokens of each sample count."""
    import torch

    counts = torch.zeros(len(lengths), dtype=torch.int64)
    counted: list[int] = counts.index_add_(0, sample_of_token(lengths), (mask_T != 0).long()).tolist()
    return counted


def _spread(values_C: Tensor, counts_T: Tensor) -> Tensor:
    """Put the values of the tokens that count where they belong among all; the others get 0."""
    spread_T = values_C.new_zeros(counts_T.shape)
    spread_T[counts_T] = values_C
    return spread_T
