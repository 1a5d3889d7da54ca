"""Comparison page: the curves of several runs in the same charts, their numbers, and what differs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from anygauge.config.tree import flatten
from anygauge.observability.control_characters import visible
from anygauge.observability.report.catalog import SECTIONS, SFT_SECTIONS, ChartSpec, Lines, Section
from anygauge.observability.report.charts import draw_sections
from anygauge.observability.report.metrics_file import Metrics, page_data
from anygauge.observability.report.page import last_value, render
from anygauge.observability.report.run_files import RunFiles
from anygauge.observability.report.summary import badge, facts, run_name, tiles, verdict

__all__ = ["render_comparison"]

NOTHING = "\N{EN DASH}"
_OWN = ("run.name", "run.directory", "run.overwrite", "run.resume")
"""Keys in which any two runs differ."""
_MOMENTARY = ("command", "memory")
"""Facts that say nothing of a difference between runs: the configs tell what the command line changed."""


def render_comparison(runs: Sequence[RunFiles]) -> str:
    """Return the page that compares runs; each has its color.

    :param runs: Two or more.
    """
    created_at, names = datetime.now(UTC), _names(runs)
    series = [
        {_key(index, name): each for name, each in run.metrics.series.items()}
        for index, run in enumerate(runs)
    ]
    every = {name: each for own in series for name, each in own.items()}
    sections = draw_sections(Metrics(every), list(_sections(runs, names)))
    drawn = {line.metric for section in sections for chart in section.charts for line in chart.lines}
    shown = [
        replace(run.metrics, series={name: each for name, each in own.items() if name in drawn})
        for run, own in zip(runs, series, strict=True)
    ]
    views = [
        {"name": name, "badge": badge(run), "verdict": verdict(run, created_at)}
        for name, run in zip(names, runs, strict=True)
    ]
    content = {
        "name": ", ".join(names),
        "runs": views,
        "numbers": list(_numbers(runs, created_at)),
        "differences": list(_differences([flatten(run.config) for run in runs], _OWN)),
        "hosts": list(_differences([run.environment for run in runs], _MOMENTARY)),
        "sections": sections,
        "last": {name: last_value(each) for own in shown for name, each in own.series.items()},
    }
    return render("compare.html", content, page_data(*shown), created_at)


def _key(run: int, metric: str) -> str:
    return f"{run}:{metric}"


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """Return the names of the runs; those of one name are named by their directories."""
    names = [run_name(run) for run in runs]
    counts = Counter(names)
    return [
        visible(str(run.directory)) if counts[name] > 1 else name
        for name, run in zip(names, runs, strict=True)
    ]


def _sections(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[Section]:
    """Yield the sections of the page: a chart for each metric that leads a chart of a run's own report."""
    metrics = dict.fromkeys(name for run in runs for name in run.metrics.series)
    for section in _catalog({run.task for run in runs}):
        yield replace(
            section, charts=tuple(each for spec in section.charts for each in _specs(spec, metrics, names))
        )


def _catalog(tasks: Collection[str]) -> Iterator[Section]:
    """Yield the sections of RL or SFT runs, or those of RL with the charts that only SFT has."""
    if "sft" not in tasks or len(tasks) == 1:
        yield from SFT_SECTIONS if "sft" in tasks else SECTIONS
        return
    known = {chart.key for section in SECTIONS for chart in section.charts}
    more = {each.key: tuple(c for c in each.charts if c.key not in known) for each in SFT_SECTIONS}
    for section in SECTIONS:
        yield replace(section, charts=(*section.charts, *more.pop(section.key, ())))
    yield from (replace(each, charts=more[each.key]) for each in SFT_SECTIONS if more.get(each.key))


def _specs(spec: ChartSpec, metrics: Mapping[str, object], names: Sequence[str]) -> Iterator[ChartSpec]:
    lines = next((each for each in spec.lines if any(each.find(metrics))), None)
    found, marked = ([], False) if lines is None else (list(lines.find(metrics)), lines.marked)
    for number, (metric, label) in enumerate(found):
        alone = len(found) == 1 and len(spec.lines) == 1
        yield replace(
            spec,
            key=f"{spec.key}-{number}",
            title=spec.title if alone else f"{spec.title}: {label}",
            about=metric,
            lines=tuple(
                Lines(re.escape(_key(run, metric)), name.replace("\\", r"\\"), marked)
                for run, name in enumerate(names)
            ),
        )


def _numbers(runs: Sequence[RunFiles], now: datetime) -> Iterator[list[str]]:
    """Yield a row for each fact and each headline number."""
    for rows in ([dict(facts(run, now)) for run in runs], [_values(run) for run in runs]):
        for name in dict.fromkeys(name for row in rows for name in row):
            yield [name, *(row.get(name, NOTHING) for row in rows)]


def _values(run: RunFiles) -> dict[str, str]:
    return {tile.label: f"{tile.value} {tile.unit} ({tile.note})".replace("  ", " ") for tile in tiles(run)}


def _differences(tables: Sequence[Mapping[str, Any]], own: Sequence[str] = ()) -> Iterator[list[str]]:
    """Yield name and values of whatever is not the same in all tables."""
    for name in dict.fromkeys(name for table in tables for name in table):
        shown = [_text(table[name]) if name in table else NOTHING for table in tables]
        if name not in own and len(set(shown)) > 1:
            yield [name, *shown]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
