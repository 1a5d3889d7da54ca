"""Time of a step by phase, over the run and in total."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median

from anygauge.observability.report.catalog import phase_metrics
from anygauge.observability.report.charts import (
    COLORS,
    MOST_POINTS,
    Chart,
    Layer,
    Line,
    all_steps,
    outside,
    step_ticks,
    value_ticks,
)
from anygauge.observability.report.metrics_file import Metrics, Series
from anygauge.observability.report.paths import area_path
from anygauge.observability.report.scale import Range, value_range

__all__ = ["PhaseRow", "draw_phases", "phase_rows"]


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """Seconds that one phase takes."""

    label: str
    median: float
    longest: float
    share: float
    """Fraction of the time of all steps, in percent."""


def draw_phases(metrics: Metrics) -> Chart | None:
    """Draw the time of each step as areas, one on another, for each phase that was recorded."""
    phases = phase_metrics(metrics.series)[:COLORS]
    steps = sorted({step for name, _ in phases for step in metrics.series[name].steps})
    if not steps:
        return None
    width = -(-len(steps) // (MOST_POINTS // 2))
    stretches = [steps[start : start + width] for start in range(0, len(steps), width)]
    columns = [_means(metrics.series[name], stretches) for name, _ in phases]
    tops = [[0.0] * len(stretches), *accumulate(columns, _add)]
    x, y = all_steps(metrics), Range(0.0, value_range(tops[-1], floor=0.0).high)
    centers = [fmean(stretch) for stretch in stretches]
    lines = [Line(name, label, color) for color, (name, label) in enumerate(phases)]
    areas = [area_path(centers, lower, upper, x, y) for lower, upper in pairwise(tops)]
    return Chart(
        key="phases",
        title="Time of a step by phase",
        about="Seconds of each phase, stacked.",
        unit="s",
        x=x,
        y=y,
        x_ticks=step_ticks(x),
        y_ticks=value_ticks(y),
        layers=[Layer("area", color, area, len(centers)) for color, area in enumerate(areas)],
        lines=lines,
        wide=True,
        left_out=outside(tops[-1], y),
        is_stacked=True,
    )


def phase_rows(metrics: Metrics) -> list[PhaseRow]:
    """Return the time of each phase."""
    series_of_phases = [(label, metrics.series[name]) for name, label in phase_metrics(metrics.series)]
    seconds = {label: [value for _, value in series.numbers] for label, series in series_of_phases}
    steps = metrics.series.get("perf/step_time", Series((), ())).numbers
    whole = sum(value for _, value in steps) or sum(map(sum, seconds.values())) or 1.0
    return [
        PhaseRow(label, median(values), max(values), 100 * sum(values) / whole)
        for label, values in seconds.items()
        if values
    ]


def _means(series: Series, stretches: Sequence[Sequence[int]]) -> list[float]:
    """Return a phase's mean over each stretch of steps; a step without it has none of it."""
    values = dict(series.numbers)
    return [fmean(max(values.get(step, 0.0), 0.0) for step in stretch) for stretch in stretches]


def _add(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(one, other, strict=True)]
