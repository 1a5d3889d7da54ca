"""Batch planning: from scored groups to the batch of each data-parallel rank. Pure, on the driver."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from statistics import fmean

import torch

from anygauge.algorithms.aggregation import Aggregation, split_steps, token_weights
from anygauge.data.balance import alike, free, imbalance, media_costs, sequence_costs
from anygauge.data.batch import pack_samples, response_rows, select
from anygauge.data.prompts import balance_groups, group_by_prompt, prompt_lengths, shared_costs
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.media import Media
from anygauge_hooks.rl import NO_VERSION, Group, Prompt, Sample

__all__ = [
    "conversation_batch",
    "plan_metrics",
    "plan_steps",
    "rollout_batch",
    "sample_seeds",
]

_log = logging.getLogger(__name__)


def conversation_batch(prompts: Sequence[Prompt]) -> TrainBatch:
    """Return conversations as a batch to imitate."""
    return pack_samples(
        [prompt.tokens for prompt in prompts],
        [prompt.response for prompt in prompts],
        loss_masks=[prompt.loss_mask for prompt in prompts],
        log_probs=[(0.0,) * len(prompt.response) for prompt in prompts],
        media=[prompt.media for prompt in prompts],
    )


def rollout_batch(groups: Sequence[Group], version: int | None = None) -> TrainBatch:
    """Return the samples of a step as one batch, group by group.

    A sample that could not be scored takes part in no group and no mean: its mask is 0 everywhere. One
    without a response token takes part in none either, and is not returned. A rollout that became several
    samples counts once, and all of them have its number.

    :param version: Version of the weights that are about to be trained; ``None`` for samples of another run.
    """
    responses = [_responses(group) for group in groups]
    of_rollouts = list(chain.from_iterable(responses))
    samples = list(chain.from_iterable(of_rollouts))
    generated = sum(len(group.samples) for group in groups)
    if len(samples) < generated:
        empty = generated - len(samples)
        _log.warning(
            "%d of %d responses have no token: there is nothing in them to train on", empty, generated
        )
    made_now = {version, NO_VERSION}
    batch = pack_samples(
        [sample.prompt_tokens for sample in samples],
        [sample.response_tokens for sample in samples],
        loss_masks=[
            sample.loss_mask if sample.error is None else (0,) * len(sample.loss_mask) for sample in samples
        ],
        log_probs=[sample.log_probs for sample in samples],
        media=[sample.media for sample in samples],
        rewards=[sample.reward or 0.0 for sample in samples],
        rollouts=[number for number, rollout in enumerate(of_rollouts) for _ in rollout],
        is_on_policy=[
            version is not None and sample.error is None and made_now.issuperset(sample.weight_versions)
            for sample in samples
        ],
    )
    ends = [[rollout[-1] for rollout in rollouts] for rollouts in responses]
    batch.group_rewards = [
        [None if end.error is not None else end.reward or 0.0 for end in own] for own in ends
    ]
    return batch


def _responses(group: Group) -> list[list[Sample]]:
    """Return the samples of each rollout that have a response token; no rollout without any."""
    rollouts = ([sample for sample in rollout if sample.response_tokens] for rollout in group.rollouts())
    return [rollout for rollout in rollouts if rollout]


def plan_steps(
    batch: TrainBatch,
    num_steps: int,
    num_ranks: int,
    aggregation: Aggregation,
    flops_per_token: Callable[[int], float] = alike,
    max_length: int = 1,
    media_flops: Callable[[Media], float] = free,
    *,
    packs_prefixes: bool = False,
) -> list[TrainBatch]:
    """Divide samples among optimizer steps, and each step among ranks by what a model computes for them.

    A step takes as many samples as there are. Where those are fewer than ranks, the shortest is repeated for
    the ranks that have none, with a mask of 0: they work, and nothing is learned from it.

    :param aggregation: Says how tokens are averaged over a step.
    :param flops_per_token: From the length of a sequence to the forward operations of one of its tokens.
    :param max_length: Most tokens that a response may have, which ``"constant_length"`` divides by.
    :param media_flops: The forward operations of a tower over a medium.
    :param packs_prefixes: Whether a rank computes a prompt once for its samples: they are kept together then.
    :returns: The batch of each rank; no step of one is empty. There are fewer steps than asked for if there
        are fewer samples.
    :raises RolloutError: There is no sample.
    """
    if not batch.lengths:
        raise RolloutError(
            "There is no sample to train on.", hint="Loosen the filter that rejects every group."
        )
    weights = torch.zeros(len(batch.loss_mask))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    idle: list[list[int]] = [[] for _ in range(num_ranks)]
    token_costs = sequence_costs(batch.lengths, flops_per_token)
    prompt_costs = sequence_costs(prompt_lengths(batch), flops_per_token)
    for drawn in _split(batch.rollouts, num_steps):
        rows = response_rows(batch.response_lengths, drawn)
        lengths, rollouts = (
            [column[i] for i in drawn] for column in (batch.response_lengths, batch.rollouts)
        )
        shares = token_weights(batch.loss_mask[rows], lengths, aggregation, max_length, rollouts)
        weights[rows] = shares.float()
        shortest = min(drawn, key=batch.lengths.__getitem__)
        samples = drawn + [shortest] * (num_ranks - len(drawn))
        costs = token_costs[samples] + media_costs([batch.media[n] for n in samples], media_flops)
        groups = _groups(batch, samples, packs_prefixes)
        for rank, places in enumerate(balance_groups(costs, prompt_costs[samples], groups, num_ranks)):
            ranks[rank].append([samples[place] for place in places])
            idle[rank].append(sum(place >= len(drawn) for place in places))
    whole = replace(batch, loss_weights=weights)
    return [_of_rank(whole, *own) for own in zip(ranks, idle, strict=True)]


def _groups(batch: TrainBatch, samples: Sequence[int], packs_prefixes: bool) -> list[list[int]]:
    """Return the places of samples that are computed together; each alone where prompts are not shared."""
    return group_by_prompt(batch, samples) if packs_prefixes else [[place] for place in range(len(samples))]


def _split(rollouts: Sequence[int], num_steps: int) -> list[list[int]]:
    """Divide samples among optimizer steps; those of one rollout stay together, and so does its weight."""
    samples: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollouts):
        samples.setdefault(rollout, []).append(sample)
    steps = split_steps(list(samples.values()), num_steps)
    return [[sample for parts in step for sample in parts] for step in steps]


def _of_rank(batch: TrainBatch, steps: Sequence[Sequence[int]], idle: Sequence[int]) -> TrainBatch:
    """Return the batch of a rank.

    :param steps: Samples of each optimizer step.
    :param idle: How many of them, the last ones, nothing is learned from.
    """
    own = select(batch, list(chain.from_iterable(steps)))
    own.steps, own.idle = [len(step) for step in steps], idle
    ends = zip(accumulate(own.steps), idle, strict=True)
    silent = response_rows(own.response_lengths, [n for end, count in ends for n in range(end - count, end)])
    assert own.loss_weights is not None
    own.loss_mask[silent] = False
    own.loss_weights[silent] = 0.0
    return own


def plan_metrics(
    batches: Sequence[TrainBatch],
    flops_per_token: Callable[[int], float],
    media_flops: Callable[[Media], float] = free,
    *,
    packs_prefixes: bool = False,
) -> dict[str, float]:
    """Return how evenly the ranks work.

    :param batches: Batch of each rank.
    """
    costs = []
    for batch in batches:
        token_costs = sequence_costs(batch.lengths, flops_per_token)
        prompt_costs = sequence_costs(prompt_lengths(batch), flops_per_token)
        own = []
        for step in (range(*bounds) for bounds in pairwise(accumulate(batch.steps, initial=0))):
            groups = _groups(batch, step, packs_prefixes)
            of_step = shared_costs(token_costs[step], prompt_costs[step], groups)
            own.append((of_step + media_costs(batch.media[step.start : step.stop], media_flops)).sum())
        costs.append(own)
    return {
        "train/idle_samples": sum(map(sum, (batch.idle for batch in batches))),
        "perf/train_imbalance": fmean(imbalance(step) for step in zip(*costs, strict=True)),
    }


def sample_seeds(
    seed: int, stream: int, step: int, prompts: int, samples: int, *, first_prompt: int = 0
) -> list[list[int]]:
    """Return a seed for every sample of a step: consecutive, from a start that is hashed from the arguments.

    :param stream: 0 for training, 1 for evaluation.
    :param first_prompt: Prompts of the step before those that seeds are asked for.
    """
    digest = hashlib.blake2b(f"{seed}/{stream}/{step}".encode(), digest_size=8).digest()
    first = int.from_bytes(digest, "big") + first_prompt * samples
    return [[(first + p * samples + i) % (1 << 63) for i in range(samples)] for p in range(prompts)]
