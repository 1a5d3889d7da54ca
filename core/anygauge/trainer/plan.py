"""From scored groups to each rank's share of each optimizer step. Pure functions, on the driver."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from anygauge.algorithms.aggregation import Aggregation, split_steps, token_weights
from anygauge.data.balance import balance
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import Group, Prompt, Sample, TrainSample

__all__ = [
    "TrainShare",
    "conversation_samples",
    "group_samples",
    "plan_steps",
    "sample_seeds",
    "split_evenly",
    "train_samples",
]

Estimator = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class TrainShare:
    """One rank's part of one optimizer step."""

    samples: tuple[TrainSample, ...]
    weights: tuple[Sequence[float], ...]
    """Per sample and response token: its share in the mean of the whole step."""


def group_samples(prompts: Sequence[Prompt], samples: Sequence[Sequence[Sample]]) -> list[Group]:
    """Put each prompt together with its samples."""
    return [Group(prompt=p, samples=tuple(s)) for p, s in zip(prompts, samples, strict=True)]


def conversation_samples(prompts: Sequence[Prompt]) -> list[TrainSample]:
    """Return conversations as samples to imitate: with nothing to compare with, and no advantage."""
    return [
        TrainSample(
            tokens=prompt.tokens + prompt.response,
            response_length=len(prompt.response),
            loss_mask=prompt.loss_mask,
            rollout_log_probs=(zeros := (0.0,) * len(prompt.response)),
            advantages=zeros,
        )
        for prompt in prompts
    ]


def train_samples(groups: Sequence[Group], estimator: Estimator) -> list[TrainSample]:
    """Return the samples with their advantages, group by group; each token has its sample's advantage.

    A sample that could not be scored takes part in no group and no mean: its mask is 0 everywhere.

    :param estimator: From the rewards ``[G]`` of one group to advantages ``[G]``. Equal groups ask it once.
    """
    known: dict[tuple[float | None, ...], list[float]] = {}
    samples: list[TrainSample] = []
    for group in groups:
        rewards = tuple(sample.reward for sample in group.samples if sample.error is None)
        if rewards not in known:
            known[rewards] = _advantages(rewards, estimator)
        advantages = iter(known[rewards])
        samples += [
            _left_out(sample) if sample.error is not None else _train_sample(sample, next(advantages))
            for sample in group.samples
        ]
    return samples


def _advantages(rewards: Sequence[float | None], estimator: Estimator) -> list[float]:
    if not rewards:
        return []
    advantages: list[float] = estimator(torch.tensor(rewards, dtype=torch.float32)).tolist()
    return advantages


def _left_out(sample: Sample) -> TrainSample:
    return _train_sample(sample, 0.0)._replace(loss_mask=(0,) * len(sample.response_tokens))


def _train_sample(sample: Sample, advantage: float) -> TrainSample:
    length = len(sample.response_tokens)
    return TrainSample(
        tokens=sample.prompt_tokens + sample.response_tokens,
        response_length=length,
        loss_mask=sample.loss_mask,
        rollout_log_probs=sample.log_probs,
        advantages=(advantage,) * length,
    )


def plan_steps(
    samples: Sequence[TrainSample], num_steps: int, num_ranks: int, aggregation: Aggregation
) -> list[list[TrainShare]]:
    """Divide samples among optimizer steps, and each step among ranks by length.

    :param aggregation: Says how tokens are averaged over a step.
    :returns: For each rank, its share of each step; none is empty.
    :raises RolloutError: There are too few samples to give each rank one in each step.
    """
    if len(samples) < num_steps * num_ranks:
        raise RolloutError(
            f"{len(samples)} samples cannot be divided among {num_steps} optimizer steps "
            f"and {num_ranks} workers.",
            hint="Raise rollout.prompts_per_step or samples_per_prompt, or lower train.optimizer_steps.",
        )
    shares: list[list[TrainShare]] = [[] for _ in range(num_ranks)]
    for step in split_steps(samples, num_steps):
        weights = token_weights([sample.loss_mask for sample in step], aggregation)
        for rank, indices in enumerate(balance([len(sample.tokens) for sample in step], num_ranks)):
            share = TrainShare(tuple(step[i] for i in indices), tuple(weights[i] for i in indices))
            shares[rank].append(share)
    return shares


def sample_seeds(seed: int, stream: int, step: int, prompts: int, samples: int) -> list[list[int]]:
    """Return a seed for every sample of a step: consecutive, from a start that is hashed from the arguments.

    :param stream: 0 for training, 1 for evaluation.
    """
    digest = hashlib.blake2b(f"{seed}/{stream}/{step}".encode(), digest_size=8).digest()
    first = int.from_bytes(digest, "big")
    return [[(first + p * samples + i) % (1 << 63) for i in range(samples)] for p in range(prompts)]


def split_evenly(count: int, parts: int) -> list[slice]:
    """Return ``parts`` contiguous slices of ``range(count)`` whose sizes differ by at most one."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [slice(first, last) for first, last in pairwise(bounds)]
