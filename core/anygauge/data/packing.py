"""Micro-batches within a token budget, of about equal cost."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np

from anygauge.data.balance import Numbers, balance, divide

__all__ = ["pack_by_cost", "pack_by_tokens"]


def pack_by_cost(
    lengths: Sequence[int],
    costs: Sequence[float] | Numbers,
    max_tokens: int,
    count: Callable[[int], int] = int,
) -> list[list[int]]:
    """Divide samples into micro-batches of about equal cost and at most ``max_tokens`` tokens.

    Ranks that wait for each other in every micro-batch take as long as the slowest in each, and a pipeline as
    long as its dearest. So the costs are even, and the dearest micro-batch is the first of every rank.

    :param lengths: Tokens of each sample.
    :param costs: Cost of each sample, as :func:`~anygauge.data.balance.sequence_costs` computes it.
    :param max_tokens: A longer sample is alone in its own micro-batch.
    :param count: From the number of micro-batches that the tokens need to the number wanted, no smaller.
    :returns: Indices into ``lengths``, each exactly once and ascending within a micro-batch. Where more
        micro-batches are wanted than there are samples, the last ones are empty.
    """
    tight = pack_by_tokens(lengths, max_tokens)
    wanted = count(len(tight))
    filled = min(wanted, len(lengths))
    cost = np.asarray(costs, dtype=np.float64)
    bins = divide(cost, filled, lengths, max_tokens)
    if bins is None:
        bins = divide(cost, filled, lengths, max_tokens, start=_split(tight, cost, filled))
    assert bins is not None, "it had bins to start with"
    return sorted(bins, key=lambda indices: (-cost[indices].sum(), indices)) + [[]] * (wanted - filled)


def _split(bins: Sequence[Sequence[int]], cost: Numbers, count: int) -> list[list[int]]:
    """Return ``count`` micro-batches, having divided the dearest ones that hold several samples."""
    parts = [list(indices) for indices in bins]
    while len(parts) < count:
        dearest = max((part for part in parts if len(part) > 1), key=lambda part: float(cost[part].sum()))
        parts.remove(dearest)
        parts += [[dearest[place] for place in places] for places in balance(cost[dearest], 2)]
    return parts


def pack_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Divide samples into few micro-batches of at most ``max_tokens`` tokens, best fit decreasing.

    Takes ``O(n log n)`` and at most 11/9 of the fewest possible bins, plus 4
    (https://doi.org/10.1137/0203025).

    :param lengths: Tokens of each sample.
    :param max_tokens: A longer sample is alone in its own micro-batch.
    :returns: Indices into ``lengths``, each exactly once and ascending within a micro-batch; the same input
        gives the same micro-batches.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        slot = bisect_left(free, (lengths[index], 0))
        if slot == len(free):
            bins.append([])
            room, number = max_tokens, len(bins) - 1
        else:
            room, number = free.pop(slot)
        bins[number].append(index)
        insort(free, (room - lengths[index], number))
    return sorted(sorted(indices) for indices in bins)
