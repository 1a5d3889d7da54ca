"""Corrections for tokens that another policy sampled than the one being trained.

The engine that sampled rounds otherwise than the trainer does, and its weights may be older. With ``p`` the
trainer's policy before the first optimizer step (``old_log_probs``) and ``q`` the one that sampled
(``rollout_log_probs``), the ratio of a token is ``p / q``, and that of a sample one of

- ``token``: ``p_t / q_t``, a ratio of its own for each token;
- ``sequence``: their product over the tokens of the sample that count, the same for each of them;
- ``geometric``: the geometric mean of these, which does not grow with the length.

Each function returns what the loss of a token is multiplied by. A token with 0 is masked: it adds nothing,
and what the loss is divided by stays as it was, as in the papers.

A ratio below exp(-20) or above exp(20) counts as one of these two.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, assert_never, get_args

from pydantic import Field

from anygauge.algorithms.sample_sums import sample_means, sample_sums
from anygauge_hooks.algorithms import Correction
from anygauge_hooks.engines import LossInputs

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Level", "icepop", "metrics_only", "mis", "rejection", "sequence_mask", "tis", "veto"]

Level = Literal["token", "sequence", "geometric"]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]

_MAX_LOG_RATIO = 20.0
_MAX_TOKEN_LOG_RATIO = 1e4
"""An engine may report -inf for a token that it sampled; a sum of such ratios must stay a number."""


def tis(
    inputs: LossInputs, *, level: Level = "token", low: NotNegative = 0.0, high: Positive = 2.0
) -> Correction:
    """Return truncated importance weights, ``clamp(ratio, low, high)``.

    Of tokens: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    https://fengyao.notion.site/off-policy-rl, ``min(p / q, C)``. Of sequences: Liu et al., "When Speed Kills
    Stability", https://yingru.notion.site/When-Speed-Kills-Stability-271211a558b7808d8b12d403fd15edda,
    Seq-TIS.

    :param inputs: Tokens of a micro-batch, ``[T]``; of whole samples, if the level is not ``"token"``.
    :param low: 0 has no lower bound, as in the papers.
    :param high: ``C``.
    :returns: The weights, and ``clipped``: 1 where a ratio was out of bounds.
    """
    ratio = _ratio(inputs, level)
    weights, clipped = ratio.clamp(low, high), {"clipped": _outside(ratio, low, high).to(ratio.dtype)}
    if level == "token":
        return Correction(weights, clipped)
    return Correction(weights, sample_metrics=clipped, by_sample=True)


def icepop(inputs: LossInputs, *, low: NotNegative = 0.5, high: Positive = 5.0) -> Correction:
    """Return each token's ratio where it is within bounds on both sides, else 0.

    IcePop, https://arxiv.org/abs/2510.18855 and equation 1 of https://arxiv.org/abs/2512.16144:
    ``M(k) = k if low <= k <= high else 0``, with ``k = p / q``.

    :param inputs: Tokens of a micro-batch, ``[T]``.
    :param low: ``alpha``.
    :param high: ``beta``.
    :returns: The weights.
    """
    return mis(inputs, level="token", low=low, high=high)


def mis(
    inputs: LossInputs, *, level: Level = "sequence", low: NotNegative = 0.0, high: Positive = 2.0
) -> Correction:
    """Return masked importance weights: the ratio where it is within bounds, else 0.

    Liu et al., "When Speed Kills Stability" (see :func:`tis`), Seq-MIS: ``rho if rho <= C else 0`` with the
    ratio of the sequence.

    :param inputs: Tokens of a micro-batch, ``[T]``; of whole samples, if the level is not ``"token"``.
    :param low: 0 has no lower bound, as in the paper.
    :param high: ``C``.
    :returns: The weights.
    """
    ratio = _ratio(inputs, level)
    return Correction(ratio.masked_fill(_outside(ratio, low, high), 0.0), by_sample=level != "token")


def rejection(inputs: LossInputs, *, level: Level, low: NotNegative, high: Positive) -> Correction:
    """Return 1 where the ratio is within bounds, else 0: a mask that weighs nothing.

    Rejection as verl and slime separate it from the weights, with which it combines. On the level
    ``"geometric"``, where bounds such as 0.999 and 1.001 are usual, it keeps long samples as readily as short
    ones.

    :param inputs: Tokens of a micro-batch, ``[T]``; of whole samples, if the level is not ``"token"``.
    :returns: The mask.
    """
    ratio = _ratio(inputs, level)
    mask = ratio.new_ones(ratio.shape).masked_fill(_outside(ratio, low, high), 0.0)
    return Correction(mask, by_sample=level != "token")


def veto(inputs: LossInputs, *, threshold: Positive = 1e-4) -> Correction:
    """Return 0 for every token of a sample that has one with a ratio below ``threshold``, else 1.

    Liu et al. (see :func:`tis`): a token that the trainer would hardly ever sample spoils all that follows
    it. One such token is lost in a mean over thousands, so no bound on those finds it.

    :param inputs: Tokens of whole samples, ``[T]``.
    :returns: The mask.
    """
    caught = _token_log_ratio(inputs) < math.log(threshold)
    kept = sample_sums(caught.to(inputs.loss_weights.dtype), inputs) == 0
    return Correction(kept.to(inputs.loss_weights.dtype), by_sample=True)


def sequence_mask(inputs: LossInputs, *, delta: NotNegative) -> Correction:
    """Return 0 for tokens with a negative advantage in samples that are far off-policy, else 1.

    Off-policy sequence masking, https://arxiv.org/abs/2512.02556 section 3.1: a token is masked if
    ``A_t < 0`` and the mean over the tokens of its sample of ``log q - log pi`` is above ``delta``. ``pi`` is
    the policy as it is being trained, so that both the engine and all optimizer steps since count. Samples
    that the policy has left and that went well still teach.

    :param inputs: Tokens of whole samples, ``[T]``.
    :param delta: In nats per token; the paper names no value.
    :returns: The mask.
    """
    log_ratio = _bounded(inputs.rollout_log_probs - inputs.log_probs)
    masked = (inputs.advantages < 0) & (sample_means(log_ratio, inputs) > delta)
    return Correction(inputs.loss_weights.new_ones(inputs.loss_weights.shape).masked_fill(masked, 0.0))


def metrics_only(inputs: LossInputs) -> Correction:
    """Report how far ``p`` and ``q`` differ, without weights.

    ``kl`` and ``kl_k3`` estimate KL(q || p) from what ``q`` sampled, http://joschu.net/blog/kl-approx.html.
    ``chi2_token`` and ``chi2_sequence`` estimate the chi-square divergence ``E[ratio^2] - 1``, which says how
    much the variance of weights without bounds would be. ``ppl_ratio`` is the perplexity of a sample under
    ``p`` over that under ``q``.

    :param inputs: Tokens of whole samples, ``[T]``.
    :returns: The metrics.
    """
    token, sequence, geometric = (_log_ratio(inputs, each) for each in get_args(Level))
    metrics = {"kl": -token, "kl_k3": token.expm1() - token, "chi2_token": (2 * token).expm1()}
    of_samples = {"chi2_sequence": (2 * sequence).expm1(), "ppl_ratio": (-geometric).exp()}
    return Correction(None, metrics, of_samples)


def _ratio(x: LossInputs, level: Level) -> Tensor:
    """Return ``p / q`` of each token, or that of its sample, ``[T]``."""
    return _log_ratio(x, level).exp()


def _log_ratio(x: LossInputs, level: Level) -> Tensor:
    log_ratio = _token_log_ratio(x)
    match level:
        case "token":
            ratio = log_ratio
        case "sequence":
            ratio = sample_sums(log_ratio, x)
        case "geometric":
            ratio = sample_means(log_ratio, x)
        case _:
            assert_never(level)
    return ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _token_log_ratio(x: LossInputs) -> Tensor:
    return _bounded(x.old_log_probs - x.rollout_log_probs)


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_TOKEN_LOG_RATIO, _MAX_TOKEN_LOG_RATIO)


def _outside(ratio: Tensor, low: float, high: float) -> Tensor:
    """Return where a ratio is out of bounds. NaN is not, so that it stays visible."""
    return (ratio < low) | (ratio > high)
