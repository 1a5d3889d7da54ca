"""Timeline of a run in its report: a row for each process and server, colored by what it did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from anygauge.observability.phases import PhaseTime, Row
from anygauge.observability.report.summary import spell_duration
from anygauge.observability.timeline import KINDS, TIMELINE_FILE, read_events

__all__ = ["COLUMNS", "Stretch", "TimelineView", "draw_timeline"]

COLUMNS = 600
"""Stretches of time that a row is divided into; each has the color of the phase that took most of it."""
ROUNDING = 1e-6
"""Columns that the end of a phase misses its place by."""
MOST_ROWS = 24
MOST_BYTES = 16 * 2**20
"""Bytes at the end of the file that are drawn; the file itself has everything."""
MOST_BREAKS = 20
LONG_BREAK = 0.1
"""A time in which no row did anything is cut out if it is longer than this fraction of all others."""


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
    Activity("lost", 8, ("lost",)),
    Activity("write a profile", 9, ("profile",)),
)
OF_PHASE: Mapping[str, int] = {name: i for i, each in enumerate(ACTIVITIES) for name in each.phases}


class Stretch(NamedTuple):
    """Columns of one color."""

    at: int
    width: int
    color: int


class Break(NamedTuple):
    """A time that is cut out because nothing ran."""

    start: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineView:
    """The drawing."""

    shown: str
    """How much of the run it shows."""
    is_end: bool
    """Whether only the end of the run is drawn, because its file is too large."""
    activities: Sequence[Activity]
    rows: Mapping[str, Sequence[Stretch]]
    """Stretches of each row, by its name."""
    breaks: Sequence[tuple[float, str]]
    """Column and duration of each time that is cut out."""
    left_out: int
    """Rows that are not drawn."""
    columns: int = COLUMNS


def draw_timeline(directory: Path) -> TimelineView | None:
    """Draw the timeline of a run; ``None`` for a run without one."""
    path = directory / TIMELINE_FILE
    try:
        events = read_events(path, most_bytes=MOST_BYTES)
    except OSError:
        return None
    rows: dict[Row, list[PhaseTime]] = defaultdict(list)
    for row, phase in events:
        if phase.name in OF_PHASE:
            rows[row].append(phase)
    return _view(rows, is_end=path.stat().st_size > MOST_BYTES) if rows else None


def _view(rows: Mapping[Row, Sequence[PhaseTime]], *, is_end: bool) -> TimelineView:
    phases = [phase for each in rows.values() for phase in each]
    # A start takes as long as many steps, and shows nothing; that of a resumed part is drawn.
    first = min((p.start for p in phases if p.name not in STARTS), default=min(p.start for p in phases))
    breaks = _breaks(phases, first)
    last = max(phase.start + phase.seconds for phase in phases)
    seconds = max(_moved(last, breaks) - first, 1e-3)
    order = sorted(rows, key=lambda row: (KINDS[row.kind][0], row.rank))
    columns = {
        row.label: _columns(
            [each._replace(start=_moved(each.start, breaks)) for each in rows[row]], first, seconds
        )
        for row in order[:MOST_ROWS]
    }
    used = {activity for each in columns.values() for activity in each}
    return TimelineView(
        shown=spell_duration(seconds),
        is_end=is_end,
        activities=[each for index, each in enumerate(ACTIVITIES) if index in used],
        rows={name: _stretches(each) for name, each in columns.items()},
        breaks=[
            ((_moved(each.start, breaks) - first) / seconds * COLUMNS, spell_duration(each.seconds))
            for each in breaks
        ],
        left_out=len(order[MOST_ROWS:]),
    )


def _breaks(phases: Sequence[PhaseTime], first: float) -> list[Break]:
    """Return the long times in which no row did anything, such as that before a resume."""
    gaps, end, busy = [], first, 0.0
    for phase in sorted(phases, key=lambda each: each.start):
        gaps.append(Break(end, phase.start - end))
        busy += max(phase.start + phase.seconds - max(end, phase.start), 0.0)
        end = max(end, phase.start + phase.seconds)
    longest = sorted(gaps, key=lambda each: -each.seconds)[:MOST_BREAKS]
    return sorted(gap for gap in longest if gap.seconds > LONG_BREAK * busy)


def _moved(time: float, breaks: Sequence[Break]) -> float:
    """Return a time without the breaks before it."""
    return time - sum(each.seconds for each in breaks if each.start < time)


def _stretches(columns: Sequence[int | None]) -> list[Stretch]:
    stretches = []
    at = 0
    for activity, run in groupby(columns):
        width = len(list(run))
        if activity is not None:
            stretches.append(Stretch(at, width, ACTIVITIES[activity].color))
        at += width
    return stretches


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
