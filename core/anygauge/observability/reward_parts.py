"""Metrics of the parts of rewards: each number of a raw reward that is a mapping."""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count
from numbers import Real
from statistics import fmean
from typing import Any

from anygauge_hooks.rl import Sample

__all__ = ["PartNames", "reward_part_metrics"]

UNSUITABLE = re.compile(r"[^\w.-]+")
"""Characters that a name of a metric does not have; a key may be a model's text."""
LONGEST_KEY = 60
MOST_PARTS = 100
"""Most names; a reward function that makes keys of a model's text would fill the trackers."""
AXIS = "step"
"""Not a part's name: ``reward/step`` is the axis that trackers draw ``reward/*`` over."""

_log = logging.getLogger(__name__)

Keys = tuple[Any, ...]
"""Keys from a raw reward down to a number."""


class PartNames:
    """Metric names of a run's reward parts; keys keep the name that they were given first.

    >>> names = PartNames()
    >>> [names.of(keys) for keys in (("has box",), ("has_box",), ("step",), ("has box",))]
    ['has_box', 'has_box_2', 'step_', 'has_box']
    """

    def __init__(self) -> None:
        self._names: dict[Keys, str] = {}
        self._is_full = False

    def of(self, keys: Keys) -> str | None:
        """Return the name of a part, or ``None``, after one warning, where the run has enough of them."""
        if keys not in self._names:
            if len(self._names) == MOST_PARTS:
                self._warn(keys)
                return None
            self._names[keys] = self._unused("/".join(map(_readable, keys)))
        return self._names[keys]

    def state(self) -> list[tuple[Keys, str]]:
        """Return what a checkpoint keeps: each part's keys and name, in the order in which they came."""
        return list(self._names.items())

    def restore(self, saved: Iterable[tuple[Iterable[Any], str]]) -> None:
        """Go on with what :meth:`state` returned, so that a resumed run gives no name to another part."""
        self._names = {tuple(keys): name for keys, name in saved}

    def _unused(self, name: str) -> str:
        first = f"{AXIS}_" if name == AXIS else name
        taken = set(self._names.values())
        return next(each for each in chain([first], _numbered(first)) if each not in taken)

    def _warn(self, keys: Keys) -> None:
        if not self._is_full:
            self._is_full = True
            _log.warning(
                "rewards have more than %d parts: %a and later ones have no metric",
                MOST_PARTS,
                _readable(keys[-1]),
            )


def _numbered(name: str) -> Iterator[str]:
    return (f"{name}_{number}" for number in count(2))


def _readable(key: object) -> str:
    return UNSUITABLE.sub("_", str(key))[:LONGEST_KEY] or "_"


def reward_part_metrics(prefix: str, samples: Iterable[Sample], names: PartNames) -> dict[str, float]:
    """Return the mean of each number in the samples' raw rewards, under its path of keys.

    A part of ``reward.parts`` has its name, and a number of a dict that a reward function returns its key;
    a dict below a part has both: ``<prefix>format/has_box``. Texts, lists and numbers that are not finite are
    left out. A sample without a key does not count in its mean.

    :param samples: Those that could not be scored are left out.
    :param names: Names of earlier steps, which are added to.

    >>> class Scored:
    ...     error, raw_reward = None, {"format": {"has box": True}, "answer": 0.5, "note": "late"}
    >>> reward_part_metrics("reward/", [Scored()], PartNames())
    {'reward/answer': 0.5, 'reward/format/has_box': 1.0}
    """
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.error is None and isinstance(sample.raw_reward, Mapping):
            for keys, number in _numbers(sample.raw_reward):
                if name := names.of(keys):
                    values[f"{prefix}{name}"].append(number)
    return {name: fmean(values[name]) for name in sorted(values)}


def _numbers(parts: Mapping[Any, Any], above: Keys = ()) -> Iterator[tuple[Keys, float]]:
    for key, value in parts.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, (*above, key))
        elif isinstance(value, Real) and math.isfinite(value):
            yield (*above, key), float(value)
