"""Chart catalog: the charts of a report, and the metrics that each shows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from anygauge.disk import parse_toml
from anygauge.observability.eval_names import EVAL_LOSS, EVAL_MEAN

__all__ = [
    "SECTIONS",
    "SFT_SECTIONS",
    "ChartSpec",
    "Lines",
    "Section",
    "eval_losses",
    "eval_means",
    "phase_metrics",
]


@dataclass(frozen=True, slots=True)
class Lines:
    """Metrics of a chart whose names match a pattern as a whole."""

    pattern: str
    label: str
    """In the legend; groups of the pattern fill it in."""
    marked: bool = False
    """Points of their own, for what is recorded now and then."""

    def find(self, names: Mapping[str, object]) -> Iterator[tuple[str, str]]:
        """Yield name and label of each metric that is shown."""
        for name in names:
            match = re.fullmatch(self.pattern, name)
            if match:
                yield name, match.expand(self.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSpec:
    """A chart, drawn where at least one of its metrics was recorded."""

    key: str
    """Identifies the chart in the page."""
    title: str
    about: str
    """Description of the chart, in a sentence."""
    lines: tuple[Lines, ...]
    unit: str = ""
    floor: float | None = None
    ceiling: float | None = None
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under one heading."""

    key: str
    title: str
    charts: tuple[ChartSpec, ...]


_PHASES = ("rollout", "reward", "log_probs", "train", "update_weights", "save")
"""In the order of a step; after them come those of plugins, and last what is in none."""
_REST = "overhead"
_PATTERNS = {"EVAL_MEAN": EVAL_MEAN, "EVAL_LOSS": EVAL_LOSS}


def _sections() -> Iterator[tuple[Section, ...]]:
    """Yield the sections of an RL run and those of an SFT run."""
    catalog = parse_toml(Path(__file__).with_name("charts.toml").read_text(encoding="utf-8"))
    charts = {name: {"key": name, **chart} for name, chart in catalog["charts"].items()}
    for line in (line for chart in charts.values() for line in chart["lines"]):
        line["pattern"] = _PATTERNS.get(line["pattern"], line["pattern"])
    for task in ("rl", "sft"):
        tables = [{**table, "charts": [charts[name] for name in table["charts"]]} for table in catalog[task]]
        yield TypeAdapter(tuple[Section, ...]).validate_python(tables)


SECTIONS, SFT_SECTIONS = _sections()
"""The charts of a report, in order. The time of a step by phase comes first in the last section."""


def phase_metrics(names: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return name and label of the metrics that divide the time of a step, in the order of a step."""
    names_of_phases = dict(Lines(r"perf/(\w+)_time", r"\1").find(names))
    # ``turns`` is the old name of ``sleep`` and ``wake_up`` together; runs of older versions have it alone.
    other = {"step", "turns"} if "perf/sleep_time" in names_of_phases else {"step"}
    phases = {phase: name for name, phase in names_of_phases.items() if phase not in other}
    others = [phase for phase in phases if phase not in (*_PHASES, _REST)]
    order = [phase for phase in (*_PHASES, *others, _REST) if phase in phases]
    return [(phases[phase], phase.replace("_", " ")) for phase in order]


def eval_means(names: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return name and data set of the metrics that are an evaluation's mean reward."""
    return list(Lines(EVAL_MEAN, r"\1").find(names))


def eval_losses(names: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return name and data set of the metrics that are an evaluation's loss."""
    return list(Lines(EVAL_LOSS, r"\1").find(names))
