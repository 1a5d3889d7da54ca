"""Micro-batches of about equal size."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

__all__ = ["pack_by_tokens"]


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
