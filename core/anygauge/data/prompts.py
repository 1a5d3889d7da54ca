"""Prompts that several samples begin with: computed once for all of them, where the engine can.

A micro-batch then holds a prompt and, behind it, the responses to it. A response attends to its prompt and to
itself, and its positions go on from the prompt's. So log-probs and gradients are those of whole samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from anygauge.data.balance import Numbers, balance, split_evenly
from anygauge.data.batch import ranges
from anygauge.data.packing import pack_by_cost
from anygauge_hooks.batch import TrainBatch

__all__ = [
    "PackedPrefixes",
    "balance_groups",
    "group_by_prompt",
    "pack_groups",
    "pack_prefixes",
    "prompt_lengths",
    "shared_costs",
]

Groups = Sequence[Sequence[int]]
"""Samples with the same prompt, group by group; each sample is in one of them."""


def prompt_lengths(batch: TrainBatch) -> list[int]:
    """Return the number of tokens before each sample's response."""
    return [length - own for length, own in zip(batch.lengths, batch.response_lengths, strict=True)]


def group_by_prompt(batch: TrainBatch, samples: Sequence[int] | None = None) -> list[list[int]]:
    """Return the places of samples with the same prompt, the groups in the order of their first sample.

    A sample with media is a group by itself: placeholders are alike, whatever they stand for.

    :param samples: Samples of the batch whose places are returned; ``None`` for all.
    """
    tokens, starts = batch.tokens.numpy(), [0, *accumulate(batch.lengths)]
    prompts = prompt_lengths(batch)
    groups: dict[bytes | int, list[int]] = {}
    for place, sample in enumerate(range(len(prompts)) if samples is None else samples):
        first = starts[sample]
        key = place if batch.media[sample] else tokens[first : first + prompts[sample]].tobytes()
        groups.setdefault(key, []).append(place)
    return list(groups.values())


def shared_costs(costs: Numbers, prompt_costs: Numbers, groups: Groups) -> Numbers:
    """Return the cost of each sample, ``[N]``, where the samples of a group share that of their prompt.

    :param costs: ``[N]``, of whole samples.
    :param prompt_costs: ``[N]``, of their prompts alone.
    """
    sizes = np.ones(len(costs))
    for group in groups:
        sizes[list(group)] = len(group)
    return costs - prompt_costs * (1 - 1 / sizes)


# -------------------------------------------------------------------------
# Division among ranks and micro-batches
# -------------------------------------------------------------------------


def balance_groups(costs: Numbers, prompt_costs: Numbers, groups: Groups, num_bins: int) -> list[list[int]]:
    """Divide samples into bins of about equal cost; a group is divided only where whole ones cost more.

    :param costs: ``[N]``, of whole samples.
    :param prompt_costs: ``[N]``, of their prompts alone.
    :param num_bins: Data-parallel ranks, at least 1 and at most ``N``.
    :returns: As of :func:`~anygauge.data.balance.balance`.
    """
    halvings = range((max(map(len, groups)) - 1).bit_length() + 1)
    divided = [_cut(groups, 1 << count) for count in halvings]
    balanced = (
        _balance(shared_costs(costs, prompt_costs, pieces), pieces, num_bins)
        for pieces in divided
        if len(pieces) >= num_bins
    )
    return min(balanced, key=lambda dearest_and_bins: dearest_and_bins[0])[1]


def _cut(groups: Groups, count: int) -> list[list[int]]:
    """Return every group in ``count`` pieces, or in single samples where it has fewer."""
    return [
        list(group[part]) for group in groups for part in split_evenly(len(group), min(count, len(group)))
    ]


def _balance(costs: Numbers, pieces: Groups, num_bins: int) -> tuple[float, list[list[int]]]:
    """Return bins of whole pieces, and the cost of the dearest bin."""
    of_pieces = np.array([costs[piece].sum() for piece in pieces])
    bins = balance(of_pieces, num_bins)
    dearest = max(float(of_pieces[places].sum()) for places in bins)
    return dearest, [_samples(pieces, places) for places in bins]


def pack_groups(
    lengths: Sequence[int],
    prompts: Sequence[int],
    costs: Numbers,
    prompt_costs: Numbers,
    groups: Groups,
    max_tokens: int,
    count: Callable[[int], int] = int,
) -> list[list[int]]:
    """Divide samples into micro-batches of about equal cost, in which a prompt counts once for its group.

    A group is in one micro-batch if it fits, and otherwise in as few as hold it.

    :param lengths: Tokens of each sample.
    :param prompts: Tokens of each sample's prompt.
    :param costs: ``[N]``, of whole samples.
    :param prompt_costs: ``[N]``, of their prompts alone.
    :param max_tokens: A longer sample is alone in its own micro-batch.
    :param count: As of :func:`~anygauge.data.packing.pack_by_cost`.
    :returns: As of :func:`~anygauge.data.packing.pack_by_cost`.
    """
    after, costs_after = np.subtract(lengths, prompts), costs - prompt_costs
    pieces = [
        [group[place] for place in places]
        for group in groups
        for places in pack_by_cost(after[group].tolist(), costs_after[group], max_tokens - prompts[group[0]])
    ]
    sizes = [prompts[piece[0]] + int(after[piece].sum()) for piece in pieces]
    of_pieces = [float(prompt_costs[piece[0]] + costs_after[piece].sum()) for piece in pieces]
    return [_samples(pieces, places) for places in pack_by_cost(sizes, of_pieces, max_tokens, count)]


def _samples(pieces: Groups, places: Sequence[int]) -> list[int]:
    return sorted(chain.from_iterable(pieces[place] for place in places))


# -------------------------------------------------------------------------
# Micro-batches
# -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackedPrefixes:
    """A micro-batch that has each prompt once. Row numbers are host tensors, int64."""

    lengths: tuple[int, ...]
    """Lengths of the segments: each prompt, and the responses to it behind it."""
    key_lengths: tuple[int, ...]
    """Number of tokens that each segment attends to: a response to its prompt too."""
    key_rows: Tensor
    """``[sum(key_lengths)]``: which rows these are."""
    rows: Tensor
    """Which row each token of the samples is, the samples end to end."""


def pack_prefixes(lengths: Sequence[int], prompts: Sequence[int], groups: Groups) -> PackedPrefixes:
    """Lay samples out with each group's prompt once, and its responses behind it.

    :param lengths: Tokens of each sample.
    :param prompts: Tokens of each sample's prompt, the same within a group.
    """
    sizes: list[int] = []
    attended: list[list[tuple[int, int]]] = []
    runs: list[list[tuple[int, int]]] = [[] for _ in lengths]
    end = 0
    for group in groups:
        prompt = end, prompts[group[0]]
        sizes.append(prompt[1])
        attended.append([prompt])
        end += prompt[1]
        for sample in group:
            runs[sample] = [prompt, (end, lengths[sample] - prompt[1])]
            sizes.append(lengths[sample] - prompt[1])
            attended.append(runs[sample])
            end += sizes[-1]
    key_lengths = tuple(sum(size for _, size in each) for each in attended)
    return PackedPrefixes(tuple(sizes), key_lengths, _rows(attended), _rows(runs))


def _rows(runs: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Return the rows of runs that are given by their first row and their size, end to end."""
    first, sizes = zip(*chain.from_iterable(runs), strict=True)
    return ranges(torch.tensor(first), sizes)
