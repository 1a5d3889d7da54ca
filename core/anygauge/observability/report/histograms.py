"""Histograms of ``distributions.jsonl``: the first recorded steps of a run against the last ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from anygauge.observability.report.charts import Chart, Layer, Line, Tick, value_ticks
from anygauge.observability.report.paths import area_path
from anygauge.observability.report.scale import Range, nice_ticks, tick_labels

__all__ = ["draw_histograms"]

MOST_BARS = 24
_FIRST, _LAST = 7, 0
"""Colors."""
_ROUNDING = 1e-3
"""Positions on a grid, or bars, that a value misses its place by: files have six digits."""
_TITLES = {
    "reward": ("Rewards", "Rewards of samples, as scored.", "samples"),
    "prompt_reward": ("Mean reward of a prompt", "Its pass rate where rewards are 0 and 1.", "prompts"),
    "length": ("Response lengths", "Response tokens of samples.", "samples"),
    "advantage": ("Advantages", "Advantages of samples within the group of their prompt.", "samples"),
}
"""Title, description and what is counted."""


class Interval(NamedTuple):
    """A value, or an interval of values, that is counted."""

    middle: float
    width: float
    """0 for a single value."""


Counts = Counter[Interval]


def draw_histograms(rows: Mapping[int, Mapping[str, Any]]) -> list[Chart]:
    """Draw each distribution that was recorded, over the first and the last tenth of the recorded steps.

    :param rows: Lines of the file by step, ascending.
    """
    steps = list(rows)
    part = max(1, len(steps) // 10)
    first, last = steps[:part] if len(steps) > 1 else [], steps[-part:]
    named = {_span(last): last} if not first else {_span(first): first, _span(last): last}
    charts = []
    for name, texts in _TITLES.items():
        counts = {span: _counts(rows[step].get(name) for step in own) for span, own in named.items()}
        if any(counts.values()):
            charts.append(_draw(name, texts, counts))
    return charts


def _span(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _counts(recorded: Iterable[Any]) -> Counts:
    """Return the sum of what was recorded; a file from elsewhere may hold anything."""
    counts: Counts = Counter()
    for entries in recorded:
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, list) and len(entry) in (2, 3) and all(map(_is_number, entry)):
                value, count, width = (*entry, 0.0)[:3]
                if count > 0 and width >= 0:
                    counts[Interval(float(value), float(width))] += count
    return counts


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e290


def _draw(name: str, texts: tuple[str, str, str], counts: Mapping[str, Counts]) -> Chart:
    intervals = {interval for each in counts.values() for interval in each}
    values = sorted({each.middle for each in intervals})
    grid = _grid([each.middle for each in intervals if not each.width])
    x, bars = _bars(sorted(intervals), grid)
    fractions = {span: _fractions(each, grid, x, bars) for span, each in counts.items()}
    y = Range(0.0, 1.08 * max(map(max, fractions.values())))
    layers, lines = [], []
    for index, (span, heights) in enumerate(fractions.items()):
        is_last = index == len(fractions) - 1
        color = _LAST if is_last else _FIRST
        edges = [x.low + (x.high - x.low) * edge / bars for bar in range(bars) for edge in (bar, bar + 1)]
        upper = [height for height in heights for _ in range(2)]
        path = area_path(edges, [0.0] * len(edges), upper, x, y)
        layers.append(Layer("area" if is_last else "outline", color, path, bars))
        lines.append(Line("", span, color))
    ticks = values if len(values) <= 8 else nice_ticks(x, 8)
    title, about, counted = texts
    return Chart(
        key=f"histogram-{name.replace('_', '-')}",
        title=title,
        about=about,
        unit=f"% of {counted}",
        x=x,
        y=y,
        x_ticks=[Tick(100 * x.fraction(t), text) for t, text in zip(ticks, tick_labels(ticks), strict=True)],
        y_ticks=value_ticks(y),
        layers=layers[::-1],
        lines=lines,
        over_steps=False,
    )


def _grid(values: Sequence[float]) -> float:
    """Return the distance of values that are equally far apart, with holes; 0 for any other ones.

    Bars that hold the same number of grid positions show no comb: it is 1 for lengths, 1/8 for the means of
    eight samples that pass or fail.
    """
    order = sorted(set(values))
    steps = [high - low for low, high in pairwise(order)]
    if not steps:
        return 0.0
    if all(value.is_integer() and abs(value) < 2**53 for value in order):
        return float(math.gcd(*map(int, steps)))
    grid = min(steps)
    is_fine = grid < 1e-6 * (order[-1] - order[0])
    return 0.0 if is_fine or any(abs(s / grid - round(s / grid)) > _ROUNDING for s in steps) else grid


def _bars(intervals: Sequence[Interval], grid: float) -> tuple[Range, int]:
    """Return the range of all bars, and their number."""
    low = min(each.middle - (each.width or grid) / 2 for each in intervals)
    high = max(each.middle + (each.width or grid) / 2 for each in intervals)
    if high > low and any(each.width for each in intervals):
        return Range(low, high), MOST_BARS
    if grid:
        positions = round((high - low) / grid)
        in_bar = -(-positions // MOST_BARS)
        bars = -(-positions // in_bar)
        return Range(low, low + bars * in_bar * grid), bars
    bars = min(len(intervals), MOST_BARS)
    width = (high - low) / (bars - 1) if bars > 1 else abs(low) or 1.0
    return Range(low - width / 2, high + width / 2), bars


def _fractions(counts: Counts, grid: float, x: Range, bars: int) -> list[float]:
    """Return the height of each bar, in percent."""
    heights = [0.0] * bars
    total = counts.total() or 1
    for (middle, width), count in counts.items():
        half = (width or grid) / 2
        low, high = (bars * x.fraction(end) for end in (middle - half, middle + half))
        for bar, share in _spread(low, high, bars):
            heights[bar] += 100 * share * count / total
    return heights


def _spread(low: float, high: float, bars: int) -> Iterator[tuple[int, float]]:
    """Yield each bar that an interval overlaps, and its share of the interval; both ends are in bars."""
    if high - low < _ROUNDING:
        yield min(int((low + high) / 2), bars - 1), 1.0
        return
    for bar in range(max(int(low), 0), min(math.ceil(high), bars)):
        yield bar, (min(high, bar + 1) - max(low, bar)) / (high - low)
