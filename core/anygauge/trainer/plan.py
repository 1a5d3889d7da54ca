"""Batch planning: from scored groups to each data-parallel rank's mini-batches. Pure, on the driver."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch

from anygauge.algorithms.aggregation import Aggregation, split_steps, token_weights
from anygauge.data.balance import Numbers, alike, balance, free, imbalance, media_costs, sequence_costs
from anygauge_hooks.errors import PluginError, RolloutError
from anygauge_hooks.media import Media
from anygauge_hooks.rl import NO_VERSION, Group, MiniBatch, Prompt, Sample, TrainSample

__all__ = [
    "conversation_samples",
    "group_samples",
    "plan_metrics",
    "plan_steps",
    "sample_seeds",
    "train_samples",
]

_log = logging.getLogger(__name__)

Estimator = Callable[..., torch.Tensor]


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
            media=prompt.media,
        )
        for prompt in prompts
    ]


def train_samples(
    groups: Sequence[Group], estimator: Estimator | None, version: int | None = None
) -> list[TrainSample]:
    """Return the samples with their advantages, group by group; each token has its sample's advantage.

    A sample that could not be scored takes part in no group and no mean: its mask is 0 everywhere. One
    without a response token takes part in none either, and is not returned. A rollout that became several
    samples counts once, and all of them have its advantage.

    :param estimator: From the rewards ``[G]`` of one group to advantages ``[G]``. Equal groups ask it once.
        ``None`` leaves them at 0, for the workers to estimate.
    :param version: Of the weights that are about to be trained; ``None`` for samples of another run.
    :raises PluginError: The estimator returned something else than one advantage for each reward.
    """
    known: dict[tuple[float | None, ...], list[float]] = {}
    samples: list[TrainSample] = []
    for group in groups:
        answered = [sample for sample in group.samples if sample.response_tokens]
        ends = _ends_of_rollouts(answered)
        rewards = tuple(sample.reward for sample in ends if sample.error is None)
        if rewards not in known:
            known[rewards] = _advantages(rewards, estimator)
        baseline = fmean(reward or 0.0 for reward in rewards) if rewards else 0.0
        if len(ends) < len(answered):
            samples += _parted(answered, known[rewards], baseline, version, first=len(samples))
            continue
        advantages = iter(known[rewards])
        samples += [
            _left_out(sample)
            if sample.error is not None
            else _train_sample(sample, next(advantages), baseline, version)
            for sample in answered
        ]
    generated = sum(len(group.samples) for group in groups)
    if len(samples) < generated:
        empty = generated - len(samples)
        _log.warning(
            "%d of %d responses have no token: there is nothing in them to train on", empty, generated
        )
    return samples


def _ends_of_rollouts(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples that stand for one rollout each: of several of one, the last."""
    if all(sample.rollout is None for sample in samples):
        return samples
    return list({_owner(place, sample): sample for place, sample in enumerate(samples)}.values())


def _owner(place: int, sample: Sample) -> tuple[bool, int]:
    return (False, place) if sample.rollout is None else (True, sample.rollout)


def _parted(
    samples: Sequence[Sample],
    advantages: Sequence[float],
    baseline: float,
    version: int | None,
    first: int,
) -> list[TrainSample]:
    """Return the samples of a group in which some rollouts have several, which share the rollout's advantage.

    :param advantages: Of the rollouts that could be scored, in the order in which they begin.
    :param first: How many samples there are before these, which makes the numbers of rollouts unique.
    """
    rest, of_rollout, parts = iter(advantages), dict[tuple[bool, int], tuple[int, float | None]](), []
    for place, sample in enumerate(samples):
        owner = _owner(place, sample)
        if owner not in of_rollout:
            of_rollout[owner] = first + place, None if sample.error is not None else next(rest)
        number, advantage = of_rollout[owner]
        made = _left_out(sample) if advantage is None else _train_sample(sample, advantage, baseline, version)
        parts.append(made if sample.rollout is None else made._replace(rollout=number))
    return parts


def _advantages(rewards: Sequence[float | None], estimator: Estimator | None) -> list[float]:
    if not rewards or estimator is None:
        return [0.0] * len(rewards)
    result: Any = estimator(torch.tensor(rewards, dtype=torch.float32))
    if not isinstance(result, torch.Tensor) or result.shape != (len(rewards),):
        shape = f" {list(result.shape)}" if isinstance(result, torch.Tensor) else ""
        raise PluginError(
            f"An advantage estimator must return one advantage for each of {len(rewards)} rewards; "
            f"this one returned a {type(result).__name__}{shape}.",
            hint="Return a tensor [G], or register the estimator with kind = 'token'.",
        )
    advantages: list[float] = result.tolist()
    return advantages


def _left_out(sample: Sample) -> TrainSample:
    return _train_sample(sample, 0.0, 0.0, None)._replace(loss_mask=(0,) * len(sample.response_tokens))


def _train_sample(sample: Sample, advantage: float, baseline: float, version: int | None) -> TrainSample:
    length = len(sample.response_tokens)
    return TrainSample(
        tokens=sample.prompt_tokens + sample.response_tokens,
        response_length=length,
        loss_mask=sample.loss_mask,
        rollout_log_probs=sample.log_probs,
        advantages=(advantage,) * length,
        reward=sample.reward or 0.0,
        baseline=baseline,
        media=sample.media,
        is_on_policy=version is not None and {version, NO_VERSION}.issuperset(sample.weight_versions),
    )


def plan_steps(
    samples: Sequence[TrainSample],
    num_steps: int,
    num_ranks: int,
    aggregation: Aggregation,
    flops_per_token: Callable[[int], float] = alike,
    max_length: int = 1,
    media_flops: Callable[[Media], float] = free,
) -> list[list[MiniBatch]]:
    """Divide samples among optimizer steps, and each step among ranks by what a model computes for them.

    A step takes as many samples as there are. Where those are fewer than ranks, the shortest is repeated for
    the ranks that have none, with a mask of 0: they work, and nothing is learnt from it.

    :param aggregation: Says how tokens are averaged over a step.
    :param flops_per_token: From the length of a sequence to the forward operations of one of its tokens.
    :param max_length: Most tokens that a response may have, which ``"constant_length"`` divides by.
    :param media_flops: The forward operations of a tower over a medium.
    :returns: Each rank's mini-batch of each step; none is empty. There are fewer steps than asked for if
        there are fewer samples.
    :raises RolloutError: There is no sample.
    """
    if not samples:
        raise RolloutError(
            "There is no sample to train on.", hint="A filter that leaves nothing must be loosened."
        )
    mini_batches: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
    for drawn in _split(samples, num_steps):
        step = drawn + _idle_samples(drawn, num_ranks - len(drawn))
        rollouts = [sample.rollout for sample in step]
        weights = token_weights(
            [sample.loss_mask for sample in step],
            aggregation,
            max_length,
            None if rollouts.count(None) == len(rollouts) else rollouts,
        )
        for rank, indices in enumerate(balance(_costs(step, flops_per_token, media_flops), num_ranks)):
            mini_batch = MiniBatch(
                tuple(step[i] for i in indices),
                tuple(weights[i] for i in indices),
                idle=sum(i >= len(drawn) for i in indices),
            )
            mini_batches[rank].append(mini_batch)
    return mini_batches


def _costs(
    samples: Sequence[TrainSample],
    flops_per_token: Callable[[int], float],
    media_flops: Callable[[Media], float],
) -> Numbers:
    lengths = [len(sample.tokens) for sample in samples]
    return sequence_costs(lengths, flops_per_token) + media_costs(samples, media_flops)


def _split(samples: Sequence[TrainSample], num_steps: int) -> list[list[TrainSample]]:
    """Divide samples among optimizer steps; those of one rollout stay together, and so does its weight."""
    if all(sample.rollout is None for sample in samples):
        return split_steps(samples, num_steps)
    rollouts: dict[tuple[bool, int], list[TrainSample]] = {}
    for place, sample in enumerate(samples):
        owner = (False, place) if sample.rollout is None else (True, sample.rollout)
        rollouts.setdefault(owner, []).append(sample)
    steps = split_steps(list(rollouts.values()), num_steps)
    return [[sample for rollout in step for sample in rollout] for step in steps]


def _idle_samples(step: Sequence[TrainSample], count: int) -> list[TrainSample]:
    if count <= 0:
        return []
    shortest = min(step, key=lambda sample: len(sample.tokens))
    return [shortest._replace(loss_mask=(0,) * shortest.response_length, rollout=None)] * count


def plan_metrics(
    mini_batches: Sequence[Sequence[MiniBatch]],
    flops_per_token: Callable[[int], float],
    media_flops: Callable[[Media], float] = free,
) -> dict[str, float]:
    """Return how evenly the ranks work.

    :param mini_batches: Of each rank, one for each optimizer step.
    """
    costs = [
        [_costs(mini_batch.samples, flops_per_token, media_flops).sum() for mini_batch in rank]
        for rank in mini_batches
    ]
    return {
        "train/idle_samples": sum(mini_batch.idle for rank in mini_batches for mini_batch in rank),
        "perf/train_imbalance": fmean(imbalance(step) for step in zip(*costs, strict=True)),
    }


def sample_seeds(seed: int, stream: int, step: int, prompts: int, samples: int) -> list[list[int]]:
    """Return a seed for every sample of a step: consecutive, from a start that is hashed from the arguments.

    :param stream: 0 for training, 1 for evaluation.
    """
    digest = hashlib.blake2b(f"{seed}/{stream}/{step}".encode(), digest_size=8).digest()
    first = int.from_bytes(digest, "big")
    return [[(first + p * samples + i) % (1 << 63) for i in range(samples)] for p in range(prompts)]
