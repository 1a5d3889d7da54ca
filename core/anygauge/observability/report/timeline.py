"""Timeline of a run in its report: a row for each process and server, colored by what it did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from anygauge.observability.control_characters import visible
from anygauge.observability.phases import PhaseTime, Row
from anygauge.observability.timeline import KINDS, TIMELINE_FILE, read_events

__all__ = ["draw_timeline"]

COLUMNS = 600
"""Stretches of time that a row is divided into; each has the color of the phase that took most of it."""
ROUNDING = 1e-6
"""Columns that the end of a phase misses its place by."""
MOST_ROWS = 24
MOST_BYTES = 16 * 2**20
"""Bytes at the end of the file that are drawn; the file itself has everything."""


class Activity(NamedTuple):
    """A color of the drawing."""

    label: str
    color: int
    phases: Sequence[str]


STARTS = ("start", "load")
ACTIVITIES = (
    Activity("generate", 0, ("generate",)),
    Activity("train", 1, ("train", "forward_backward", "optimizer", "train_values")),
    Activity("log-probs and values", 3, ("log_probs", "values", "teacher")),
    Activity("sync weights", 2, ("sync", "weight_sync", "paused")),
    Activity("sleep and wake up", 6, ("sleep", "wake_up", "asleep")),
    Activity("save", 4, ("save",)),
    Activity("evaluate", 5, ("evaluate",)),
    Activity("start", 7, STARTS),
    Activity("lost", 7, ("lost",)),
    Activity("write a profile", 7, ("profile",)),
)
OF_PHASE: Mapping[str, int] = {name: i for i, each in enumerate(ACTIVITIES) for name in each.phases}


def draw_timeline(directory: Path) -> str:
    """Return the section of the report as HTML; empty for a run without a timeline."""
    try:
        events = read_events(directory / TIMELINE_FILE, most_bytes=MOST_BYTES)
    except OSError:
        return ""
    rows: dict[Row, list[PhaseTime]] = defaultdict(list)
    for row, phase in events:
        if phase.name in OF_PHASE:
            rows[row].append(phase)
    if not rows:
        return ""
    starts = {phase.start: phase.name in STARTS for phases in rows.values() for phase in phases}
    # A start takes as long as many steps, and shows nothing; that of a resumed part is drawn.
    first = min((start for start, is_start in starts.items() if not is_start), default=min(starts))
    last = max(phase.start + phase.seconds for phases in rows.values() for phase in phases)
    return "\n".join(_section(rows, first, max(last - first, 1e-3)))


def _section(rows: Mapping[Row, Sequence[PhaseTime]], first: float, seconds: float) -> Iterator[str]:
    order = sorted(rows, key=lambda row: (KINDS[row.kind][0], row.rank))
    yield '<section id="timeline"><h2>Timeline</h2>'
    yield (
        f'<p class="lead">What each process and each server did in {_duration(seconds)}. A stretch has the '
        f"colour of what took most of it. Open <code>{TIMELINE_FILE}</code> in ui.perfetto.dev to zoom.</p>"
    )
    drawn = {row: _columns(rows[row], first, seconds) for row in order[:MOST_ROWS]}
    used = {activity for columns in drawn.values() for activity in columns}
    yield '<div class="card"><ul class="legend">'
    for index, activity in enumerate(ACTIVITIES):
        if index in used:
            yield f'<li><i class="swatch c{activity.color}"></i>{activity.label}</li>'
    yield "</ul>"
    for row, columns in drawn.items():
        yield _row(row, columns)
    if len(order) > MOST_ROWS:
        yield f'<p class="note">{len(order) - MOST_ROWS} more rows are in the file.</p>'
    yield "</div></section>"


def _row(row: Row, columns: Sequence[int | None]) -> str:
    label = row.kind if row.kind == "driver" else f"{row.kind}-{row.rank}"
    paths = []
    at = 0
    for activity, run in groupby(columns):
        width = len(list(run))
        if activity is not None:
            color = ACTIVITIES[activity].color
            paths.append(f'<path style="fill: var(--c{color})" d="M{at} 0h{width}v1h{-width}z"/>')
        at += width
    return (
        '<div style="display: flex; align-items: center; gap: 10px; margin-top: 4px">'
        f'<code style="flex: 0 0 5.5em">{escape(visible(label))}</code>'
        f'<svg viewBox="0 0 {COLUMNS} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)} over time" style="flex: 1; height: 16px; background: var(--line)">'
        f"{''.join(paths)}</svg></div>"
    )


def _columns(phases: Sequence[PhaseTime], first: float, seconds: float) -> list[int | None]:
    """Return for each stretch of time the activity that took most of it; the inner one of equals."""
    shares: list[dict[int, float]] = [{} for _ in range(COLUMNS)]
    for phase in sorted(phases, key=lambda each: -each.seconds):
        start = (phase.start - first) / seconds * COLUMNS
        end = start + phase.seconds / seconds * COLUMNS
        for column in range(max(0, int(start)), min(COLUMNS, int(end) + 1)):
            share = min(end, column + 1) - max(start, column)
            if share > ROUNDING:
                activity = OF_PHASE[phase.name]
                shares[column][activity] = shares[column].get(activity, 0.0) + share
    return [max(reversed(each), key=each.__getitem__) if each else None for each in shares]


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"
