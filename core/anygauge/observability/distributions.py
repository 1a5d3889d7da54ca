"""``distributions.jsonl``: rewards, lengths, prompt means and advantages of the samples of a few steps."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["DISTRIBUTIONS_FILE", "record_distributions", "value_counts"]

DISTRIBUTIONS_FILE = "distributions.jsonl"
"""Name of the file in the run directory."""
MOST_VALUES = 64
"""Distinct values of a distribution; more are counted in as many equal intervals."""

_log = logging.getLogger(__name__)


def record_distributions(directory: Path, step: int, values: Mapping[str, Iterable[float]]) -> None:
    """Append the distributions of a step.

    The run goes on without them where the file cannot be written. Example line::

        {"step": 5, "reward": [[0.0, 5], [1.0, 3]], "length": [[2.0, 8]]}

    More than 64 distinct values are counted in intervals, each ``[middle, count, width]``.

    :param values: Values of samples or prompts, by name; one without any is left out.
    """
    counts = {name: each for name, numbers in values.items() if (each := value_counts(numbers))}
    try:
        with open(directory / DISTRIBUTIONS_FILE, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, **counts}) + "\n")
    except OSError as error:
        _log.warning("the distributions of step %d are not recorded: %s", step, error)


def value_counts(values: Iterable[float]) -> list[tuple[float, ...]]:
    """Return how often each value occurs, ascending; or the middle, the count and the width of intervals.

    >>> value_counts([1.0, 0.0, 1.0])
    [(0.0, 1), (1.0, 2)]
    """
    counts = Counter(float(f"{value:.6g}") for value in values)
    if len(counts) <= MOST_VALUES:
        return sorted(counts.items())
    low, width = _intervals(counts)
    middles: Counter[float] = Counter()
    for value, count in counts.items():
        interval = min(int((value - low) / width), MOST_VALUES - 1)
        middles[float(f"{low + (interval + 0.5) * width:.6g}")] += count
    return [(middle, count, width) for middle, count in sorted(middles.items())]


def _intervals(values: Iterable[float]) -> tuple[float, float]:
    """Return where intervals begin, and their width: equally many integers are in each of them."""
    values = list(values)
    low, high = min(values), max(values)
    if all(value.is_integer() for value in values):
        return low - 0.5, float(-(-(high - low + 1) // MOST_VALUES))
    return low, (high - low) / MOST_VALUES
