"""Metrics of the first and the latest steps of a run, as the rules see them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

__all__ = ["FIRST", "LATEST", "History"]

FIRST = 5
"""Values of the beginning that are kept of a metric."""
LATEST = 60
"""Latest values that are kept of a metric."""


class History:
    """Values of some metrics.

    :param names: Metrics that are kept.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._latest = {name: deque[float](maxlen=LATEST) for name in names}
        self._first: dict[str, list[float]] = {name: [] for name in self._latest}
        self._now: Mapping[str, float | None] = {}

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Take the metrics of one more step; ``None`` stands for a value that is not finite."""
        self._now = metrics
        for name in metrics.keys() & self._latest.keys():
            given = metrics[name]
            value = math.nan if given is None else float(given)
            self._latest[name].append(value)
            if len(self._first[name]) < FIRST:
                self._first[name].append(value)

    def has(self, name: str) -> bool:
        """Return whether the latest step recorded a metric."""
        return name in self._now

    def now(self, name: str) -> float:
        """Return a metric of the latest step, which has recorded it; NaN where it is not finite."""
        value = self._now[name]
        return math.nan if value is None else float(value)

    def latest(self, name: str, count: int) -> list[float]:
        """Return the last values of a metric, at most ``count``."""
        return list(self._latest[name])[-count:]

    def first(self, name: str) -> list[float]:
        """Return the first values of a metric, at most :data:`FIRST`."""
        return self._first[name]
