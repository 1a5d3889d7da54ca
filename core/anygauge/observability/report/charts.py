"""Charts as the page draws them: what they show, their axes and their layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from anygauge.observability.report.catalog import ChartSpec, Section
from anygauge.observability.report.metrics_file import Metrics, Series
from anygauge.observability.report.paths import dots_path, line_path
from anygauge.observability.report.scale import (
    Point,
    Range,
    format_number,
    nice_ticks,
    smooth,
    thin,
    tick_labels,
    value_range,
)

__all__ = [
    "COLORS",
    "MOST_POINTS",
    "Chart",
    "Layer",
    "Line",
    "SectionView",
    "Tick",
    "all_steps",
    "draw_sections",
    "outside",
    "sparkline",
    "step_ticks",
    "value_ticks",
]

MOST_POINTS = 590
"""Most points of one series in a drawing; the page's data have them all."""
COLORS = 8
"""Series that one chart tells apart; further ones are named below it."""
_SMOOTHED = 100
"""A series of more points is drawn as a smoothed line over faint points."""
_SPARK_POINTS = 60
_FEW = 3
"""Points below which a series is drawn even if all of them are equal."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A place on an axis, in percent, and what stands there."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Layer:
    """One path of a drawing."""

    kind: str
    """``line``, ``faint`` (dots behind a smoothed line), ``dots`` or ``area``."""
    color: int
    path: str
    points: int


@dataclass(frozen=True, slots=True)
class Line:
    """A series in the legend and in the read-out."""

    metric: str
    """Empty for one that is no metric of the page, and has no read-out."""
    label: str
    color: int
    marked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing with its axes and texts."""

    key: str
    title: str
    about: str
    unit: str
    x: Range
    y: Range
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    layers: Sequence[Layer]
    lines: Sequence[Line]
    wide: bool = False
    notes: Sequence[str] = ()
    left_out: str = ""
    """A sentence about values that the range leaves out."""
    is_stacked: bool = False
    over_steps: bool = True
    """Whether steps are on the axis, and the page can read out the values of one."""


@dataclass(frozen=True, slots=True)
class SectionView:
    """The charts of a section, and those that are not drawn."""

    key: str
    title: str
    charts: Sequence[Chart]
    missing: Sequence[str]
    """Titles of those whose metrics were not recorded."""
    constant: Sequence[str]
    """Titles and values of those whose metrics never changed."""


def draw_sections(metrics: Metrics, sections: Sequence[Section]) -> list[SectionView]:
    """Draw every chart whose metrics were recorded."""
    steps = all_steps(metrics)
    return [_section(section, metrics, steps) for section in sections]


def _section(section: Section, metrics: Metrics, steps: Range) -> SectionView:
    lines = {spec: list(_lines(spec, metrics)) for spec in section.charts}
    missing = [spec.title for spec, own in lines.items() if not own]
    constant = {spec: text for spec, own in lines.items() if own and (text := _constant(own, metrics))}
    charts = [_draw(spec, own, metrics, steps) for spec, own in lines.items() if own and spec not in constant]
    listed = [f"{spec.title} ({text})" for spec, text in constant.items()]
    return SectionView(section.key, section.title, charts, missing, listed)


def _constant(lines: Sequence[Line], metrics: Metrics) -> str:
    """Return the values of a chart whose lines are all flat; nothing for any other one."""
    values = [[value for _, value in metrics.series[line.metric].numbers] for line in lines]
    if any(len(each) < _FEW or min(each) < max(each) for each in values):
        return ""
    shown = [format_number(each[0]) for each in values]
    named = (f"{line.label} {value}" for line, value in zip(lines, shown, strict=True))
    return shown[0] if len(lines) == 1 else ", ".join(named)


def all_steps(metrics: Metrics) -> Range:
    """Return the steps that all charts show, so that they can be compared."""
    first = min((series.steps[0] for series in metrics.series.values()), default=0)
    return Range(first, max(metrics.last_step, first + 1))


def _draw(spec: ChartSpec, lines: Sequence[Line], metrics: Metrics, steps: Range) -> Chart:
    shown = lines[:COLORS]
    values = [value for line in shown for _, value in metrics.series[line.metric].numbers]
    y = value_range(values, spec.floor, spec.ceiling)
    return Chart(
        key=spec.key,
        title=spec.title,
        about=spec.about,
        unit=spec.unit,
        x=steps,
        y=y,
        x_ticks=step_ticks(steps),
        y_ticks=value_ticks(y),
        layers=[each for line in reversed(shown) for each in _layers(line, metrics, steps, y)],
        lines=shown,
        wide=spec.wide,
        notes=list(_too_many(lines[COLORS:])),
        left_out=outside(values, y),
    )


def _lines(spec: ChartSpec, metrics: Metrics) -> Iterator[Line]:
    """Yield the lines of a chart; metrics that are equal at every step share one."""
    lines: dict[Series, Line] = {}
    for pattern in spec.lines:
        for metric, label in pattern.find(metrics.series):
            series = metrics.series[metric]
            # A label that is not the catalog's own is the name of a data set, or of a run.
            is_word = not pattern.marked and "\\" in pattern.label
            named = label.replace("_", " ").strip() if is_word else label
            if (same := lines.get(series)) is not None:
                lines[series] = replace(same, label=f"{same.label}, {named}")
            elif series.numbers:
                lines[series] = Line(metric, named, len(lines), pattern.marked)
    yield from lines.values()


def _layers(line: Line, metrics: Metrics, x: Range, y: Range) -> Iterator[Layer]:
    points = metrics.series[line.metric].points
    if line.marked or len(points) <= _SMOOTHED:
        kept = thin(points, MOST_POINTS)
        yield Layer("line", line.color, line_path(kept, x, y), len(kept))
        if line.marked:
            yield Layer("dots", line.color, dots_path(kept, x, y), len(kept))
        return
    kept = thin(points, MOST_POINTS)
    yield Layer("faint", line.color, dots_path(kept, x, y), len(kept))
    # Cut to the range, so that one outlier does not lift a whole stretch of the line.
    cut = [(step, value if value is None else min(max(value, y.low), y.high)) for step, value in points]
    smoothed = smooth(cut, max(9, len(points) // 30) | 1, MOST_POINTS)
    yield Layer("line", line.color, line_path(smoothed, x, y), len(smoothed))


def step_ticks(x: Range) -> list[Tick]:
    """Return the ticks of an axis of steps."""
    ticks = [tick for tick in nice_ticks(x, 8) if tick == int(tick)]
    return [Tick(100 * x.fraction(tick), format_number(tick, 4)) for tick in ticks]


def value_ticks(y: Range) -> list[Tick]:
    """Return the ticks of an axis of values."""
    ticks = nice_ticks(y, 6)
    return [Tick(100 * y.fraction(t), text) for t, text in zip(ticks, tick_labels(ticks), strict=True)]


def outside(values: Sequence[float], y: Range) -> str:
    """Return a sentence about the values that a range leaves out, or nothing."""
    left_out = [value for value in values if not y.low <= value <= y.high]
    if not left_out:
        return ""
    count = f"{len(left_out)} points are" if len(left_out) > 1 else "1 point is"
    farthest = max(left_out, key=lambda value: max(value - y.high, y.low - value))
    return f"{count} outside this range, the farthest at {format_number(farthest)}."


def _too_many(lines: Sequence[Line]) -> Iterator[str]:
    if lines:
        yield f"Not drawn: {', '.join(line.label for line in lines)}."


def sparkline(series: Series) -> str:
    """Return a small, smoothed line without axes, in the same box; empty for a series without a number."""
    numbers: list[Point] = list(series.numbers)
    if not numbers:
        return ""
    points = smooth(numbers, len(numbers) // _SPARK_POINTS * 2 + 1, _SPARK_POINTS)
    x = Range(points[0][0], max(points[-1][0], points[0][0] + 1))
    return line_path(points, x, value_range([value for _, value in points if value is not None]))
