"""Inputs and outputs of algorithms: advantages, corrections, the critic's loss.

Shape suffixes: N samples, T their response tokens, end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AdvantageInputs", "Correction", "TokenAdvantages", "ValueInputs", "ValueLoss"]

_NOTHING: Mapping[str, Tensor] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """The samples that one data-parallel rank has of a whole rollout. Host tensors, float32, no gradient.

    They are columns of the batch that is trained on: an estimator must not change them.
    """

    lengths: Sequence[int]
    """Response tokens of each sample; they add up to ``T``."""
    loss_mask: Tensor
    """``[T]``, 1 where the policy sampled the token and it is trained on."""
    scores: Tensor
    """``[N]``, the reward of each sample; 0 of one that could not be scored, whose mask is 0 everywhere."""
    baselines: Tensor
    """``[N]``, the mean reward of each sample's group."""
    rewards: Tensor
    """``[T]``, the score at the last token that counts, less ``algorithm.kl_reward_coef`` times the log-ratio
    to the reference at each."""
    log_probs: Tensor | None
    """``[T]``, under the policy before the first optimizer step; ``None`` where nothing needs them before."""
    values: Tensor | None
    """``[T]``, what the critic expects before each token; ``None`` without a critic."""
    teacher_log_probs: Tensor | None
    """``[T]``, under the teacher; ``None`` without one."""
    total: Callable[[Tensor], Tensor]
    """Sums a tensor over the data-parallel ranks. A collective: every rank calls it equally often.
    Context-, tensor- and pipeline-parallel ranks have the same samples, which are counted once."""


class TokenAdvantages(NamedTuple):
    """Output of a token-level advantage estimator."""

    advantages: Tensor
    """``[T]``."""
    returns: Tensor | None = None
    """``[T]``, what the critic is to expect; ``None`` of an estimator without one."""


class Correction(NamedTuple):
    """Output of a correction for one micro-batch."""

    importance_weights: Tensor | None
    """``[T]``, what the policy loss of each token is multiplied by, without gradient: not negative, and 0 of
    a token that is masked; ``None`` leaves the loss as it is."""
    metrics: Mapping[str, Tensor] = _NOTHING
    """Metrics by name, ``[T]``: averaged as the loss is."""
    sample_metrics: Mapping[str, Tensor] = _NOTHING
    """Metrics by name, ``[T]``: averaged over samples, each by the mean of its tokens, whatever
    ``algorithm.loss_aggregation`` is."""
    by_sample: bool = False
    """Whether the weights are alike for all tokens of a sample, and so are reported as ``sample_metrics``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInputs:
    """One micro-batch of the critic, flattened over its loss tokens. All tensors are ``[T]``, float32."""

    values: Tensor
    """Values of the weights being trained, with gradient."""
    old_values: Tensor
    """Values before the first optimizer step."""
    returns: Tensor
    loss_mask: Tensor
    """1 where a token counts."""
    loss_weights: Tensor
    """The share of each token in the mean over the whole step, mask included."""


ValueLoss = Callable[["ValueInputs"], tuple["Tensor", Mapping[str, "Tensor"]]]
"""Returns the scalar loss contribution of a micro-batch, and metrics that add up over micro-batches."""
