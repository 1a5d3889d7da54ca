"""Histograms of ``distributions.jsonl``: the first recorded steps of a run against the last ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from anygauge.observability.report.charts import Chart, Layer, Line, Tick, value_ticks
from anygauge.observability.report.paths import area_path
from anygauge.observability.report.scale import Range, nice_ticks, tick_labels

__all__ = ["draw_histograms"]

MOST_BARS = 24
_FIRST, _LAST = 7, 0
"""Colours."""
_TITLES = {
    "reward": ("Rewards", "Of samples, as scored.", "samples"),
    "prompt_reward": ("Mean reward of a prompt", "Its pass rate where rewards are 0 and 1.", "prompts"),
    "length": ("Response lengths", "Of samples, in tokens.", "samples"),
    "advantage": ("Advantages", "Of samples within the group of their prompt.", "samples"),
}
"""Title, description and what is counted."""

Counts = Counter[float]


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


def _counts(recorded: Any) -> Counts:
    """Return the sum of what was recorded; a file from elsewhere may hold anything."""
    counts: Counts = Counter()
    for pairs in recorded:
        for pair in pairs if isinstance(pairs, list) else ():
            if isinstance(pair, list) and len(pair) == 2 and all(type(each) in (int, float) for each in pair):
                value, count = pair
                if abs(value) < 1e290 and 0 < count < 1e15:
                    counts[float(value)] += count
    return counts


def _draw(name: str, texts: tuple[str, str, str], counts: Mapping[str, Counts]) -> Chart:
    values = sorted({value for each in counts.values() for value in each})
    bars = min(len(values), MOST_BARS)
    width = (values[-1] - values[0]) / (bars - 1) if bars > 1 else abs(values[0]) or 1.0
    x = Range(values[0] - width / 2, values[-1] + width / 2)
    fractions = {span: _fractions(each, x, bars) for span, each in counts.items()}
    y = Range(0.0, 1.08 * max(map(max, fractions.values())))
    layers, lines = [], []
    for index, (span, heights) in enumerate(fractions.items()):
        is_last = index == len(fractions) - 1
        colour = _LAST if is_last else _FIRST
        edges = [x.low + (x.high - x.low) * edge / bars for bar in range(bars) for edge in (bar, bar + 1)]
        upper = [height for height in heights for _ in range(2)]
        path = area_path(edges, [0.0] * len(edges), upper, x, y)
        layers.append(Layer("area" if is_last else "outline", colour, path, bars))
        lines.append(Line("", span, colour))
    ticks = values if bars <= 8 else nice_ticks(x, 8)
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


def _fractions(counts: Counts, x: Range, bars: int) -> list[float]:
    """Return the height of each bar, in percent."""
    heights = [0.0] * bars
    total = counts.total() or 1
    for value, count in counts.items():
        heights[min(int(bars * x.fraction(value)), bars - 1)] += 100 * count / total
    return heights
