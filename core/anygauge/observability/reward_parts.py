"""Metrics of the parts of rewards: each number of a raw reward that is a mapping."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from statistics import fmean
from typing import Any

from anygauge_hooks.rl import Sample

__all__ = ["reward_part_metrics"]

UNSUITABLE = re.compile(r"[^A-Za-z0-9_.-]+")
"""Characters that a name of a metric does not have; a key may be a model's text."""
LONGEST_KEY = 60


def reward_part_metrics(prefix: str, samples: Iterable[Sample]) -> dict[str, float]:
    """Return the mean of each number in the samples' raw rewards, under its path of keys.

    A part of ``reward.parts`` has its name, and a number of a dict that a reward function returns its key;
    a dict below a part has both: ``<prefix>format/has_box``. Texts, lists and numbers that are not finite are
    left out. A sample without a key does not count in its mean.

    :param samples: Those that could not be scored are left out.

    >>> class Scored:
    ...     error, raw_reward = None, {"format": {"has box": True}, "answer": 0.5, "note": "late"}
    >>> reward_part_metrics("reward/", [Scored()])
    {'reward/answer': 0.5, 'reward/format/has_box': 1.0}
    """
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.error is None and isinstance(sample.raw_reward, Mapping):
            for name, number in _numbers(sample.raw_reward):
                values[f"{prefix}{name}"].append(number)
    return {name: fmean(values[name]) for name in sorted(values)}


def _numbers(parts: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, float]]:
    for key, value in parts.items():
        name = path + UNSUITABLE.sub("_", str(key))[:LONGEST_KEY]
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{name}/")
        elif isinstance(value, Real) and math.isfinite(value):
            yield name, float(value)
