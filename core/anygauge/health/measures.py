"""Values that rules compare with their limits, from the history of a run.

Each function returns ``None`` where there is nothing to judge yet, and NaN where a metric is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean, median

from anygauge.health.history import FIRST, LATEST, History

__all__ = [
    "Measure",
    "average",
    "entropy_left",
    "gradient_spike",
    "latest",
    "memory_growth",
    "typical",
    "without_signal",
]

Measure = Callable[[History], float | None]

SPIKE_STEPS = 5
SPIKE_BASELINE = 10
PASS_RATE = "passrate/pass@1"


def latest(name: str) -> Measure:
    """Return a measure: the metric of the step itself."""
    return lambda history: history.now(name)


def typical(name: str, steps: int) -> Measure:
    """Return a measure: the median of a metric over the last steps, once there are so many."""

    def measure(history: History) -> float | None:
        values = history.latest(name, steps)
        return _median(values) if len(values) == steps else None

    return measure


def average(name: str, steps: int) -> Measure:
    """Return a measure: the mean of a metric over the last steps, once there are so many."""

    def measure(history: History) -> float | None:
        values = history.latest(name, steps)
        return sum(values) / steps if len(values) == steps else None

    return measure


def without_signal(history: History) -> float | None:
    """Return the fraction of generated groups that teach nothing: rejected by a filter, or of equal rewards.

    Where an estimator does not compare the samples of a group (one sample for each prompt, or a critic), the
    fraction of steps whose samples all have the same reward.
    """
    spreads = history.latest("rollout/reward_std", 10)
    if len(spreads) < 10:
        return None
    if not history.has("passrate/pass@2") or history.has("train/value_loss"):
        return fmean(spread == 0 for spread in spreads)
    equal = history.latest("rollout/zero_std_ratio", 10)
    filtered = history.latest("rollout/filtered_ratio", 10) or [0.0] * len(equal)
    return _median([1 - (1 - zero) * (1 - out) for zero, out in zip(equal, filtered, strict=False)])


def entropy_left(history: History) -> float | None:
    """Return the entropy as a fraction of that of the first steps, over the same fraction of the failures.

    A policy that learns gets surer: as long as it fails less often by as much, it gets better too. Nothing
    where it does not fail any more.
    """
    entropy, passed = history.latest("train/entropy_loss", 5), history.latest(PASS_RATE, 5)
    first, failed = history.first("train/entropy_loss"), 1 - _median(history.first(PASS_RATE))
    fails = 1 - _median(passed)
    if (
        len(history.latest("train/entropy_loss", 2 * FIRST)) < 2 * FIRST
        or not _median(first) > 0
        or not fails > 0
    ):
        return None
    return _median(entropy) / _median(first) / (min(1.0, fails / failed) if failed > 0 else 1.0)


def gradient_spike(history: History) -> float | None:
    """Return the largest gradient norm of the last steps, divided by the largest of those before.

    Not by their median: a small batch of a policy that is nearly always right has ten times its gradient now
    and then. Steps without any gradient do not count.
    """
    values = history.latest("train/grad_norm", LATEST)
    before = [value for value in values[:-SPIKE_STEPS] if math.isfinite(value) and value > 0]
    now = [value for value in values[-SPIKE_STEPS:] if math.isfinite(value)]
    return max(now) / max(before) if now and len(before) >= SPIKE_BASELINE else None


def memory_growth(history: History) -> float | None:
    """Return the GiB by which the driver or a worker grew in 40 steps, where both halves of these grew.

    The slower half counts, twice: a process that once took more, and then stays, does not leak. The least of
    20 steps counts of memory that comes and goes.
    """
    names = ("perf/driver_rss_gib", "perf/worker_rss_gib")
    grown = [each for name in names if (each := _growth(history.latest(name, LATEST))) is not None]
    return max(grown, default=None)


def _growth(values: list[float]) -> float | None:
    if len(values) < LATEST:
        return None
    begin, middle, end = (min(values[start : start + 20]) for start in (0, 20, 40))
    return max(0.0, 2 * min(middle - begin, end - middle))


def _median(values: list[float]) -> float:
    """Return the median; NaN where a value is not finite, which has no place in an order."""
    return median(values) if all(map(math.isfinite, values)) else math.nan
