"""Division of samples into parts that take about the same time.

The cost of a sample is what a model computes for it. It grows faster than its length, since attention
compares every token with those before it; parts of equal token counts are therefore not of equal cost.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from anygauge_hooks.media import Media

__all__ = ["alike", "balance", "divide", "free", "imbalance", "media_costs", "sequence_costs"]

TOLERANCE = 1e-3
"""Relative excess over the mean that the largest part may have."""
MAX_EXCHANGES = 8
"""For each part."""

Numbers = NDArray[np.float64]


def sequence_costs(lengths: Sequence[int], flops_per_token: Callable[[int], float]) -> Numbers:
    """Return the floating-point operations of a forward pass over each sequence, ``[N]``.

    :param flops_per_token: From the length of a sequence to the operations of one of its tokens; asked once
        for each length.
    """
    distinct, which = np.unique(np.asarray(lengths, dtype=np.int64), return_inverse=True)
    costs = np.array([flops_per_token(length) * length for length in distinct.tolist()], dtype=np.float64)
    return costs[which]


def media_costs(shown: Sequence[Sequence[Media]], flops: Callable[[Media], float]) -> Numbers:
    """Return the floating-point operations of a forward pass over the media of each sample, ``[N]``.

    Samples that share a medium share its cost, since a micro-batch computes it once.

    :param shown: Media of each sample.
    :param flops: Function from a medium to its floating-point operations.
    """
    if not any(shown):
        return np.zeros(len(shown))
    keys = [{each.key for each in media} for media in shown]
    holders = Counter(chain.from_iterable(keys))
    costs = {each.key: flops(each) / holders[each.key] for media in shown for each in media}
    return np.array([sum(costs[key] for key in mine) for mine in keys], dtype=np.float64)


def free(media: Media) -> float:
    """Return a cost of 0 for a medium."""
    return 0.0


def alike(length: int) -> float:
    """Return the same for a token of any sequence, so that costs are lengths."""
    return 1.0


def imbalance(loads: Sequence[float] | Numbers) -> float:
    """Return the largest load over the mean: 1 is even, and so are loads that are all 0."""
    mean = float(np.mean(loads))
    return float(np.max(loads)) / mean if mean else 1.0


def balance(costs: Sequence[float] | Numbers, num_bins: int) -> list[list[int]]:
    """Divide samples into bins of about equal cost.

    :param costs: ``[N]``, of each sample, at least 0; any unit.
    :param num_bins: Data-parallel ranks, at least 1.
    :returns: ``num_bins`` lists of indices into ``costs``, each index once and ascending within a bin. None
        is empty if there are as many samples as bins.
    """
    bins = divide(costs, num_bins)
    assert bins is not None, "without a limit everything fits"
    return bins


def divide(
    costs: Sequence[float] | Numbers,
    num_bins: int,
    sizes: Sequence[int] | Numbers | None = None,
    max_size: float = np.inf,
    start: Sequence[Sequence[int]] | None = None,
) -> list[list[int]] | None:
    """Divide samples into bins of about equal cost whose sizes stay under a limit.

    The dearest sample left goes to the cheapest bin that has room for it, which alone is at most a third off
    the best division (https://doi.org/10.1137/0117039). Then samples of the dearest bin are exchanged for
    cheaper ones of the others, as long as that helps. Both look at costs and sizes alone, so the order of the
    samples decides only which of several equal ones goes where.

    :param costs: ``[N]``, at least 0; the division is best where none is smaller for a larger sample.
    :param sizes: ``[N]``, at least 0; ``None`` for 0 everywhere.
    :param max_size: Largest size of a bin with more than one sample.
    :param start: Bins within the limit to begin with.
    :returns: As of :func:`balance`; ``None`` if there was no room for a sample.
    """
    cost = np.asarray(costs, dtype=np.float64)
    size = np.zeros(len(cost)) if sizes is None else np.asarray(sizes, dtype=np.float64)
    order = np.lexsort((np.arange(len(cost)), size, cost))[::-1]
    cost, size = cost[order], size[order]
    if start is None:
        bins = _place(cost.tolist(), size.tolist(), num_bins, max_size)
        if bins is None:
            return None
    else:
        places = np.argsort(order)
        bins = [sorted(places[list(indices)].tolist()) for indices in start]
    _exchange(bins, cost, size, max_size)
    return [np.sort(order[places]).tolist() if places else [] for places in bins]


def _place(
    costs: Sequence[float], sizes: Sequence[float], num_bins: int, max_size: float
) -> list[list[int]] | None:
    """Give each sample, in order, to the cheapest bin with room; of equally cheap ones to that of fewest."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    used = [0.0] * num_bins
    heap = [(0.0, 0, number) for number in range(num_bins)]
    for place, (cost, size) in enumerate(zip(costs, sizes, strict=True)):
        full = []
        while heap and heap[0][1] and used[heap[0][2]] + size > max_size:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, count, number = heap[0]
        heapq.heapreplace(heap, (load + cost, count + 1, number))
        bins[number].append(place)
        used[number] += size
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _exchange(bins: list[list[int]], cost: Numbers, size: Numbers, max_size: float) -> None:
    """Lower the cost of the dearest bin by exchanges with others, in place.

    :param bins: Ascending places in ``cost`` and ``size``, which descend.
    """
    if len(bins) < 2:
        return
    loads = np.array([cost[places].sum() for places in bins])
    used = np.array([size[places].sum() for places in bins])
    enough = loads.mean() * (1 + TOLERANCE)
    for _ in range(MAX_EXCHANGES * len(bins)):
        high = int(loads.argmax())
        if loads[high] <= enough or len(bins[high]) < 2:
            return
        for low in np.argsort(loads, kind="stable").tolist():
            gap = float(loads[high] - loads[low])
            room = (max_size - used[low], max_size - used[high])
            pair = _best_pair(bins[high], bins[low], cost, size, gap, room) if gap > 0 else None
            if pair is not None:
                break
        else:
            return
        for number, gone, come in ((high, *pair), (low, *reversed(pair))):
            bins[number] = sorted({*bins[number], come} - {gone, NOTHING})
            loads[number], used[number] = cost[bins[number]].sum(), size[bins[number]].sum()


NOTHING = -1
"""Instead of a sample: the exchange is a gift."""


def _best_pair(
    high: Sequence[int],
    low: Sequence[int],
    cost: Numbers,
    size: Numbers,
    gap: float,
    room: tuple[float, float],
) -> tuple[int, int] | None:
    """Return which sample of the dearer bin to exchange for which of the cheaper one, or for nothing.

    The best pair differs in cost by half of what the bins differ by. One that leaves either bin dearer than
    the dearer one was is no help.

    :param gap: Difference of the bins' costs.
    :param room: How much larger the cheaper bin may become, and the dearer one.
    """
    given = np.array(high)
    taken = np.array([NOTHING, *reversed(low)])
    taken_cost, taken_size = np.append(0.0, cost[taken[1:]]), np.append(0.0, size[taken[1:]])
    after = np.searchsorted(taken_cost, cost[given] - gap / 2)
    fitting = np.searchsorted(taken_size, size[given] - room[0])
    tried = np.stack([after - 1, after]).clip(fitting, len(taken) - 1).clip(0)
    difference = cost[given] - taken_cost[tried]
    growth = size[given] - taken_size[tried]
    misses = np.abs(difference - gap / 2)
    misses[(growth > room[0]) | (-growth > room[1])] = np.inf
    best = int(misses.argmin())
    if misses.flat[best] >= gap / 2 * (1 - TOLERANCE):
        return None
    return int(given[best % len(given)]), int(taken[tried.flat[best]])


def split_evenly(count: int, parts: int) -> list[slice]:
    """Return ``parts`` contiguous slices of ``range(count)`` whose sizes differ by at most one."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [slice(first, last) for first, last in pairwise(bounds)]
