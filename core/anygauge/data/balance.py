"""Division of samples among data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["balance"]


def balance(costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Divide samples into bins of about equal cost and, to within one, of equal count.

    Longest processing time first: the dearest sample left goes to the cheapest bin that may still take one.
    Equal counts keep every rank busy, and none of them empty with at least ``num_bins`` samples.

    :param costs: Of each sample, at least 0; any unit.
    :param num_bins: Data-parallel ranks, at least 1.
    :returns: ``num_bins`` lists of indices into ``costs``, each index once and ascending within a bin.
    """
    capacity, num_larger = divmod(len(costs), num_bins)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0.0] * num_bins
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        limit = capacity + (num_larger > 0)
        chosen = min(
            (number for number in range(num_bins) if len(bins[number]) < limit),
            key=lambda number: (loads[number], number),
        )
        num_larger -= len(bins[chosen]) == capacity
        bins[chosen].append(index)
        loads[chosen] += costs[index]
    return [sorted(indices) for indices in bins]
