"""Batches of single samples, and what engines return by sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anygauge.data.batch import flat, pack_samples
from anygauge.trainer.plan import plan_steps
from anygauge_hooks.algorithms import ValueLoss
from anygauge_hooks.batch import TopKLogProbs, TrainBatch
from anygauge_hooks.engines import LossFunction
from anygauge_hooks.media import Media

__all__ = [
    "TrainSample",
    "column",
    "log_probs",
    "make_batch",
    "plan_samples",
    "split",
    "train_step",
    "train_values",
    "unpack_samples",
    "values",
]

PerSample = Sequence[Tensor] | Sequence[Sequence[float]]
"""Numbers of each sample, one per response token."""


class TrainSample(NamedTuple):
    """A sample of a batch."""

    tokens: Sequence[int]
    response_length: int
    loss_mask: Sequence[int]
    rollout_log_probs: Sequence[float]
    advantages: Sequence[float]
    reward: float = 0.0
    baseline: float = 0.0
    rollout: int | None = None
    media: tuple[Media, ...] = ()
    is_on_policy: bool = False


def make_batch(samples: Sequence[TrainSample], **columns: Any) -> TrainBatch:
    """Pack samples, with their advantages; ``None`` stands for no rollout of several samples.

    :param columns: Further columns of the batch, end to end.
    """
    split = [len(sample.tokens) - sample.response_length for sample in samples]
    batch = pack_samples(
        [sample.tokens[:first] for sample, first in zip(samples, split, strict=True)],
        [sample.tokens[first:] for sample, first in zip(samples, split, strict=True)],
        loss_masks=[sample.loss_mask for sample in samples],
        log_probs=[sample.rollout_log_probs for sample in samples],
        media=[sample.media for sample in samples],
        rewards=[sample.reward for sample in samples],
        rollouts=[
            place if sample.rollout is None else len(samples) + sample.rollout
            for place, sample in enumerate(samples)
        ],
        is_on_policy=[sample.is_on_policy for sample in samples],
    )
    batch.baselines = torch.tensor([sample.baseline for sample in samples])
    batch.group_advantages = column([sample.advantages for sample in samples])
    batch.advantages = batch.group_advantages
    for name, values in columns.items():
        setattr(batch, name, values)
    return batch


def column(values: PerSample) -> Tensor:
    """Return numbers of samples end to end, float32."""
    if all(isinstance(each, Tensor) for each in values):
        return torch.cat([torch.as_tensor(each).float() for each in values])
    return flat(values, torch.float32)  # type: ignore[arg-type]


def split(batch: TrainBatch, column: Tensor) -> list[Tensor]:
    """Return the numbers of each sample."""
    return list(torch.split(column, list(batch.response_lengths)))


def unpack_samples(batch: TrainBatch) -> list[TrainSample]:
    """Return the samples of a batch."""
    baselines = torch.zeros(len(batch.lengths)) if batch.baselines is None else batch.baselines
    advantages = batch.advantages if batch.advantages is not None else batch.group_advantages
    none = torch.zeros(len(batch.loss_mask))
    return [
        TrainSample(*sample)
        for sample in zip(
            [each.tolist() for each in torch.split(batch.tokens, list(batch.lengths))],
            batch.response_lengths,
            [each.int().tolist() for each in split(batch, batch.loss_mask)],
            [each.tolist() for each in split(batch, batch.rollout_log_probs)],
            [each.tolist() for each in split(batch, none if advantages is None else advantages)],
            batch.rewards.tolist(),
            baselines.tolist(),
            batch.rollouts,
            batch.media,
            batch.is_on_policy,
            strict=True,
        )
    ]


def plan_samples(samples: Sequence[TrainSample], *arguments: Any, **options: Any) -> list[TrainBatch]:
    """Return the batch of each rank; the arguments are those of ``plan_steps``."""
    return plan_steps(make_batch(samples), *arguments, **options)


def log_probs(engine: Any, samples: Sequence[TrainSample], **options: Any) -> list[Tensor]:
    """Return the log-probs of each sample's response, ``[R]``."""
    batch = make_batch(samples)
    return split(batch, engine.log_probs(batch, **options))


def train_step(
    engine: Any,
    samples: Sequence[TrainSample],
    loss: LossFunction,
    *,
    loss_weights: PerSample,
    old_log_probs: PerSample,
    reference_log_probs: PerSample | None = None,
    teacher: TopKLogProbs | None = None,
    **options: Any,
) -> Mapping[str, float]:
    """Take an optimizer step of an engine."""
    batch = make_batch(
        samples,
        loss_weights=column(loss_weights),
        old_log_probs=column(old_log_probs),
        reference_log_probs=None if reference_log_probs is None else column(reference_log_probs),
        teacher_top_k=teacher,
    )
    metrics: Mapping[str, float] = engine.train_step(batch, loss, **options)
    return metrics


def values(critic: Any, samples: Sequence[TrainSample]) -> list[Tensor]:
    """Return the values of each sample's response, ``[R]``."""
    batch = make_batch(samples)
    return split(batch, critic.values(batch))


def train_values(
    critic: Any,
    samples: Sequence[TrainSample],
    loss: ValueLoss,
    *,
    loss_weights: PerSample,
    old_values: PerSample,
    returns: PerSample,
) -> Mapping[str, float]:
    """Take an optimizer step of a critic."""
    batch = make_batch(
        samples, loss_weights=column(loss_weights), values=column(old_values), returns=column(returns)
    )
    metrics: Mapping[str, float] = critic.train_values(batch, loss)
    return metrics
