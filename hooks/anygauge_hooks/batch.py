"""Batch of one data-parallel partition, as a train engine takes it.

Shape suffixes: N samples, S their tokens end to end, T their response tokens end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.media import Media

__all__ = ["TopKLogProbs", "TrainBatch"]


class TopKLogProbs(NamedTuple):
    """The top-k tokens of a model in the place of each of ``T`` response tokens."""

    ids: Tensor
    """``[T, K]``, int64, most probable first."""
    log_probs: Tensor
    """``[T, K + 1]``, float32; the last one is of all other tokens together, -1e4 where there are none."""
    sampled: Tensor
    """``[T]``, float32: the log-probabilities of the response tokens themselves."""


@dataclass(slots=True, kw_only=True, eq=False)
class TrainBatch:
    """Packed samples: columns of host tensors, one row per sample, token or response token.

    The driver fills in the rollouts and divides them. A worker adds the columns that are ``None`` at first:
    log-probs and values from the passes before the first optimizer step, then advantages. An engine must not
    change a column.
    """

    tokens: Tensor
    """``[S]``, int32: prompt and response of each sample."""
    lengths: Sequence[int]
    """Tokens of each sample; they add up to ``S``."""
    response_lengths: Sequence[int]
    """Response tokens of each sample, its last tokens; they add up to ``T``."""
    loss_mask: Tensor
    """``[T]``, bool: which tokens count."""
    rollout_log_probs: Tensor
    """``[T]``, float32, as the rollout engine reported them."""
    rewards: Tensor
    """``[N]``, float32; 0 for a sample that could not be scored, whose mask is 0 everywhere."""
    rollouts: Sequence[int]
    """Number of each sample's rollout, counted over the whole RL step. A rollout may have several samples."""
    media: Sequence[tuple[Media, ...]]
    """Media of each sample, in the order of their placeholders."""
    is_on_policy: Sequence[bool]
    """Whether the weights that the step trains sampled all tokens of a sample, before its first optimizer
    step."""
    group_rewards: Sequence[Sequence[float | None]] = ()
    """Rewards of all rollouts of the RL step, group by group; ``None`` for one that could not be scored."""
    steps: Sequence[int] = ()
    """Number of samples in each optimizer step, in order; they add up to ``N``."""
    idle: Sequence[int] = ()
    """How many samples of each optimizer step repeat another one, for a rank that would have none."""
    loss_weights: Tensor | None = None
    """``[T]``, float32: share of each token in the mean of its optimizer step over all ranks."""
    old_log_probs: Tensor | None = None
    """``[T]``, float32, under the weights that the ratio is taken against. ``None`` in an optimizer step:
    under the weights of that step, before its update."""
    reference_log_probs: Tensor | None = None
    """``[T]``, float32, under the frozen reference."""
    teacher_log_probs: Tensor | None = None
    """``[T]``, float32, under the teacher."""
    teacher_top_k: TopKLogProbs | None = None
    """Top-k log-probs of the teacher."""
    values: Tensor | None = None
    """``[T]``, float32: values of the critic before each response token."""
    baselines: Tensor | None = None
    """``[N]``, float32: mean reward of each sample's group."""
    group_advantages: Tensor | None = None
    """``[T]``, float32, from the rewards of groups; 0 with a token-level estimator."""
    advantages: Tensor | None = None
    """``[T]``, float32: advantages that are trained on."""
    returns: Tensor | None = None
    """``[T]``, float32: targets of the critic."""
