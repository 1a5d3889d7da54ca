"""Packing of samples into a :class:`~anygauge_hooks.batch.TrainBatch`, and selection of samples from one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anygauge_hooks.batch import TopKLogProbs, TrainBatch
from anygauge_hooks.errors import DataError
from anygauge_hooks.media import Media

__all__ = ["flat", "mini_batches", "pack_samples", "ranges", "response_rows", "select", "starts"]

_OF_SAMPLES = ("lengths", "response_lengths", "rollouts", "media", "is_on_policy", "rewards", "baselines")
"""Columns with one row per sample."""


def pack_samples(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    loss_masks: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]],
    media: Sequence[tuple[Media, ...]],
    rewards: Sequence[float] | None = None,
    rollouts: Sequence[int] | None = None,
    is_on_policy: Sequence[bool] | None = None,
) -> TrainBatch:
    """Return samples as one batch of a single optimizer step.

    :param loss_masks: For each sample, one number per response token, and so are the log-probs.
    :param rollouts: ``None`` if each sample is a rollout by itself.
    :raises DataError: A sample has more or fewer values than response tokens.
    """
    for index, values in enumerate(zip(prompts, responses, loss_masks, log_probs, strict=True)):
        prompt, response, *token_counts = map(len, values)
        if token_counts != [response, response]:
            raise DataError(
                f"Sample {index} of {prompt + response} tokens has a response of {response}, and mask and "
                f"log-probs of {token_counts[0]}, {token_counts[1]} values.",
                hint="Give one mask value and one log-prob for each response token.",
            )
    count = len(responses)
    return TrainBatch(
        tokens=flat(chain.from_iterable(zip(prompts, responses, strict=True)), torch.int32),
        lengths=[len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)],
        response_lengths=[len(response) for response in responses],
        loss_mask=flat(loss_masks, torch.bool),
        rollout_log_probs=flat(log_probs, torch.float32),
        rewards=torch.zeros(count) if rewards is None else torch.tensor(rewards, dtype=torch.float32),
        rollouts=range(count) if rollouts is None else rollouts,
        media=media,
        is_on_policy=[False] * count if is_on_policy is None else is_on_policy,
        steps=[count],
        idle=[0],
    )


def flat(values: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Return numbers of all samples end to end; each is rounded once."""
    numbers = np.fromiter(chain.from_iterable(values), np.float64 if dtype.is_floating_point else np.int64)
    return torch.from_numpy(numbers).to(dtype)


def select(batch: TrainBatch, samples: Sequence[int]) -> TrainBatch:
    """Return some samples of a batch, in this order, as a single optimizer step."""
    of_responses = response_rows(batch.response_lengths, samples)
    rows = dict.fromkeys(_OF_SAMPLES, torch.tensor(samples, dtype=torch.int64))
    rows["tokens"] = response_rows(batch.lengths, samples)
    columns: dict[str, Any] = {"steps": [len(samples)], "idle": [0]}
    for column in fields(batch):
        name, value = column.name, getattr(batch, column.name)
        if isinstance(value, Tensor):
            columns[name] = value.index_select(0, rows.get(name, of_responses))
        elif isinstance(value, TopKLogProbs):
            columns[name] = TopKLogProbs(*(each.index_select(0, of_responses) for each in value))
        elif name in _OF_SAMPLES and value is not None:
            columns[name] = [value[sample] for sample in samples]
    return replace(batch, **columns)


def mini_batches(batch: TrainBatch) -> list[TrainBatch]:
    """Return the samples of each optimizer step; a single one is the batch itself, which engines know."""
    if len(batch.steps) == 1:
        return [batch]
    bounds = accumulate(batch.steps, initial=0)
    return [
        select(batch, range(first, first + count)) for first, count in zip(bounds, batch.steps, strict=False)
    ]


def response_rows(lengths: Sequence[int], samples: Sequence[int]) -> Tensor:
    """Return the rows of some samples in a column of sequences end to end, int64."""
    first = starts(lengths)
    return ranges(first[torch.tensor(samples, dtype=torch.int64)], [lengths[sample] for sample in samples])


def starts(lengths: Sequence[int]) -> Tensor:
    """Return the first row of each sequence, int64."""
    return torch.tensor([0, *accumulate(lengths)][:-1], dtype=torch.int64)


def ranges(starts: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return ``start, start + 1, ...`` of each range, end to end, int64.

    By NumPy: torch wakes all of its threads to repeat numbers, while the device waits for a micro-batch.
    """
    counts = np.array(lengths, dtype=np.int64)
    shifts = starts.numpy() - (counts.cumsum() - counts)
    return torch.from_numpy(np.arange(counts.sum()) + shifts.repeat(counts))
