"""``metrics.jsonl`` as one series per metric, and as the data that a page carries."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from anygauge.strict_json import parse_json

__all__ = ["MOST_NUMBERS", "Metrics", "Series", "page_data", "read_metrics"]

MOST_NUMBERS = 150_000
"""Most numbers in a page, about 3 MB. A longer run is thinned in the page, and complete in the file."""
_LARGEST = 1e290
_LONGEST_STEP = 1e12
"""Seconds, and tokens a second, that are not believed of a step."""
_SHORT = 1000
"""Series of up to so many points are never thinned."""


@dataclass(frozen=True)
class Series:
    """A metric over the steps of its group, ascending; ``None`` where it was not finite."""

    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    @cached_property
    def points(self) -> list[tuple[int, float | None]]:
        """Points to draw and to sum up, clamped so that no sum of them overflows."""
        bounded = (v if v is None else max(-_LARGEST, min(v, _LARGEST)) for v in self.values)
        return list(zip(self.steps, bounded, strict=True))

    @cached_property
    def numbers(self) -> list[tuple[int, float]]:
        """The points that are numbers."""
        return [(step, value) for step, value in self.points if value is not None]


@dataclass(frozen=True, slots=True)
class Metrics:
    """All metrics of a run, by name in the order of their first appearance."""

    series: Mapping[str, Series]
    broken_lines: int = 0
    """Lines that are no JSON object, such as one that a kill cut short."""
    spent: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """``tokens`` and ``seconds`` of all steps up to each step, as far as the run recorded them."""

    @property
    def last_step(self) -> int:
        """The last step of any metric; 0 for none."""
        return max((series.steps[-1] for series in self.series.values()), default=0)

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of each step, ascending; ``step`` is its number."""
        rows: dict[int, dict[str, Any]] = {}
        for name, series in self.series.items():
            for step, value in zip(series.steps, series.values, strict=True):
                rows.setdefault(step, {"step": step})[name] = value
        return [rows[step] for step in sorted(rows)]


def read_metrics(path: Path) -> Metrics:
    """Read a metrics file, also while it grows.

    A step that was recorded again, by a resumed run, has the later value.

    :param path: Path of a file that exists.
    """
    points: dict[str, dict[int, float | None]] = {}
    broken = 0
    with path.open("rb") as lines:
        for line in lines:
            row = _row(line)
            if row is None:
                broken += bool(line.strip())
            else:
                _add(points, row)
    series = {name: _series(values) for name, values in points.items()}
    return Metrics(series, broken, _spent(series))


def _spent(series: Mapping[str, Series]) -> dict[str, dict[int, float]]:
    """Sum up tokens and seconds of the steps, those of a repeated step once."""
    seconds, rates = (_credible(series.get(f"perf/{name}")) for name in ("step_time", "tokens_per_s"))
    tokens = {step: value * rates[step] for step, value in seconds.items() if step in rates}
    totals = {"tokens": tokens, "seconds": seconds}
    return {
        name: dict(zip(own, accumulate(own.values()), strict=True)) for name, own in totals.items() if own
    }


def _credible(series: Series | None) -> dict[int, float]:
    points = series.numbers if series else ()
    return {step: value for step, value in points if 0 <= value < _LONGEST_STEP}


def page_data(*runs: Metrics, most: int = MOST_NUMBERS) -> dict[str, Any]:
    """Return all metrics as JSON types, with each distinct step axis of a run once.

    ``{"every": 1, "axes": [[1, 2]], "spent": {"tokens": [[300, 610]]}, "metrics": {"train/loss": [0, [0.5,
    null]]}}`` is one metric on the axis of index 0: up to step 2 the run had spent 610 tokens. ``every`` is
    above 1 where only each so manieth point of long series is kept.

    :param runs: With names that differ.
    :param most: Numbers above which long series are thinned.
    """
    every = math.ceil(sum(len(each.steps) for run in runs for each in run.series.values()) / most) or 1
    axes: dict[tuple[int, tuple[int, ...]], int] = {}
    columns: dict[str, list[Any]] = {}
    for index, run in enumerate(runs):
        for name, series in run.series.items():
            kept = _kept(len(series.steps), every)
            axis = axes.setdefault((index, series.steps[kept]), len(axes))
            columns[name] = [axis, list(series.values[kept])]
    units = [unit for unit in ("tokens", "seconds") if all(unit in run.spent for run in runs if run.series)]
    spent = {unit: [_up_to(runs[run].spent[unit], steps) for run, steps in axes] for unit in units}
    return {"every": every, "axes": [list(steps) for _, steps in axes], "spent": spent, "metrics": columns}


def _up_to(totals: Mapping[int, float], steps: Sequence[int]) -> list[float]:
    """Return the total at each step; 0 before the first."""
    known, values = list(totals), [0.0, *totals.values()]
    return [round(values[bisect_right(known, step)], 3) for step in steps]


def _kept(length: int, every: int) -> slice:
    """Return which points stay: the last one, and every so manieth before it."""
    return slice(None) if length <= _SHORT else slice((length - 1) % every, None, every)


def _row(line: bytes) -> Mapping[str, Any] | None:
    try:
        row = parse_json(line, strict=False)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _add(points: dict[str, dict[int, float | None]], row: Mapping[str, Any]) -> None:
    steps = {name[:-5]: step for name, step in row.items() if name.endswith("/step")}
    for name, value in row.items():
        step = steps.get(name.partition("/")[0])
        if type(step) is int and not name.endswith("/step") and type(value) in (float, int, type(None)):
            finite = value is not None and math.isfinite(value)
            points.setdefault(name, {})[step] = value if finite else None


def _series(values: Mapping[int, float | None]) -> Series:
    steps = sorted(values)
    return Series(tuple(steps), tuple(values[step] for step in steps))
