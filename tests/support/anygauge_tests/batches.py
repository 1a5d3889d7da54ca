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
from anygauge_hooks.engines import LossFunction, LossInputs
from anygauge_hooks.media import Media

__all__ = [
    "TrainSample",
    "column",
    "likelihood",
    "log_probs",
    "make_batch",
    "plan_samples",
    "random_samples",
    "sample_of",
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


def sample_of(
    tokens: Sequence[int], response_length: int, *, log_prob: float = -0.5, advantage: float = 1.0
) -> TrainSample:
    """Return a sample with the same log-prob and the same advantage for each token of its response."""
    return TrainSample(
        tokens=tokens,
        response_length=response_length,
        loss_mask=[1] * response_length,
        rollout_log_probs=[log_prob] * response_length,
        advantages=[advantage] * response_length,
    )


def random_samples(
    lengths: Sequence[tuple[int, int]], low: int, high: int, *, seed: int = 1
) -> list[TrainSample]:
    """Return samples of tokens from ``low`` to below ``high``.

    :param lengths: Tokens and response tokens of each sample.
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        sample_of(torch.randint(low, high, (length,), generator=generator).tolist(), response)
        for length, response in lengths
    ]


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


def weights(engine: Any) -> dict[str, Tensor]:
    """Return copies of an engine's weights by their Hugging Face names."""
    return {name: tensor.clone() for name, tensor in engine.weights()}


def likelihood(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the negated sum of the log-probs by their weights, a loss without advantages."""
    loss = -(inputs.log_probs * inputs.loss_weights).sum()
    return loss, {"loss": loss.detach()}


def train_step(
    engine: Any,
    samples: Sequence[TrainSample],
    loss: LossFunction = likelihood,
    *,
    temperature: float = 1.0,
    loss_weights: PerSample | None = None,
    old_log_probs: PerSample | None = None,
    reference_log_probs: PerSample | None = None,
    teacher: TopKLogProbs | None = None,
    entropy_grad: bool = False,
) -> dict[str, float]:
    """Take an optimizer step of an engine.

    :param loss_weights: ``None`` for the mean over all response tokens.
    :param old_log_probs: ``None`` for those of the rollout.
    """
    total = sum(sample.response_length for sample in samples)
    weights = loss_weights or [[1 / total] * sample.response_length for sample in samples]
    batch = make_batch(
        samples,
        loss_weights=column(weights),
        old_log_probs=column(old_log_probs or [sample.rollout_log_probs for sample in samples]),
        reference_log_probs=None if reference_log_probs is None else column(reference_log_probs),
        teacher_top_k=teacher,
    )
    return dict(engine.train_step(batch, loss, temperature=temperature, entropy_grad=entropy_grad))


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
