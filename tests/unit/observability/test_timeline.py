"""The timeline of a run: as a trace that grows, and as a drawing in the report."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from anygauge.observability.phases import PhaseTime, Row, record_phase, take_phases
from anygauge.observability.report.timeline import COLUMNS, draw_timeline
from anygauge.observability.timeline import TIMELINE_FILE, Timeline, read_events

DRIVER, ACTOR, ENGINE = Row("driver"), Row("actor", 1), Row("engine", 0)
MANY = 2**20


def written(directory: Path, rows: Iterable[tuple[Row, PhaseTime]]) -> Path:
    timeline = Timeline(directory / TIMELINE_FILE)
    for row, phase in rows:
        timeline.add(row, [phase])
    timeline.close()
    return directory / TIMELINE_FILE


def complete(path: Path) -> list[Any]:
    return [(each["pid"], each["name"]) for each in json.loads(path.read_text()) if each["ph"] == "X"]


def test_a_block_is_a_phase_of_its_process_also_if_it_raises() -> None:
    take_phases()
    before = time.time()
    with suppress(KeyError), record_phase("outer"), record_phase("inner"):
        raise KeyError
    inner, outer = take_phases()
    assert (inner.name, outer.name) == ("inner", "outer")
    assert before <= outer.start <= inner.start
    assert 0 <= inner.seconds <= outer.seconds
    assert take_phases() == []


def test_the_file_is_whole_json_after_each_call_and_names_its_rows(tmp_path: Path) -> None:
    path = tmp_path / TIMELINE_FILE
    timeline = Timeline(path)
    assert json.loads(path.read_text()) == []
    timeline.add(DRIVER, [])
    timeline.add(DRIVER, [PhaseTime("train", 1_700_000_000.5, 0.25)])
    first = json.loads(path.read_text())
    assert first[-1] == {
        "name": "train",
        "ph": "X",
        "pid": 1,
        "tid": 0,
        "ts": 1700000000500000,
        "dur": 250000,
    }
    timeline.add(ACTOR, [PhaseTime("generate", 2.0, 1.0), PhaseTime("optimizer", 3.0, 1.0)])
    timeline.add(ACTOR, [PhaseTime("save", 4.0, 1.0)])
    events = json.loads(path.read_text())
    names = [(each["name"], each["args"]) for each in events if each["ph"] == "M"]
    assert names == [
        *[("process_name", {"name": "driver"}), ("process_sort_index", {"sort_index": 1})],
        *[("thread_name", {"name": "driver"}), ("process_name", {"name": "training workers"})],
        *[("process_sort_index", {"sort_index": 2}), ("thread_name", {"name": "actor-1"})],
    ]
    assert complete(path) == [(1, "train"), (2, "generate"), (2, "optimizer"), (2, "save")]
    timeline.close()
    timeline.add(ACTOR, [PhaseTime("late", 5.0, 1.0)])
    assert len(complete(path)) == 4


@pytest.mark.parametrize("cut", ["", "[", "[\n", *range(1, 200, 7)])
def test_a_resumed_run_goes_on_where_a_kill_left_the_file(tmp_path: Path, cut: Any) -> None:
    path = written(tmp_path, [(DRIVER, PhaseTime("train", 1.0, 1.0)), (DRIVER, PhaseTime("sync", 2.0, 1.0))])
    whole = path.read_text()
    path.write_text(cut if isinstance(cut, str) else whole[:-cut])
    timeline = Timeline(path)
    kept = complete(path)
    assert kept == [(1, "train"), (1, "sync")][: len(kept)]
    assert len(kept) == (0 if isinstance(cut, str) else 2 if cut <= 3 else len(kept))
    timeline.add(ENGINE, [PhaseTime("paused", 3.0, 1.0)])
    timeline.close()
    assert complete(path) == [*kept, (4, "paused")]


def test_only_half_an_event_is_lost(tmp_path: Path) -> None:
    path = written(tmp_path, [(DRIVER, PhaseTime(f"step {n}", n, 1.0)) for n in range(100)])
    path.write_text(path.read_text()[:-10])
    Timeline(path).close()
    assert complete(path) == [(1, f"step {n}") for n in range(99)]


def test_a_full_disk_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        timeline = Timeline(tmp_path / "no" / "such" / TIMELINE_FILE)
        timeline.add(DRIVER, [PhaseTime("train", 1.0, 1.0)])
        timeline.close()
    (record,) = caplog.records
    assert "timeline.json is not written any more: [Errno 2]" in record.message


def test_lines_that_are_no_phase_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, [(ACTOR, PhaseTime("train", 1.5, 0.5))])
    garbage = ["nonsense,", "{}", '{"ph":"X"}', '{"name":"a","ph":"X","pid":9,"tid":0,"ts":0,"dur":0}', "[1]"]
    path.write_text("\n".join([*garbage, path.read_text()]))
    assert read_events(path, most_bytes=MANY) == [(ACTOR, PhaseTime("train", 1.5, 0.5))]
    assert read_events(path, most_bytes=10) == []


# -------------------------------------------------------------------------
# The drawing
# -------------------------------------------------------------------------


def stretches(section: str, row: str) -> list[tuple[int, int, int]]:
    """Return color, first column and columns of each stretch of a row."""
    (line,) = [line for line in section.splitlines() if f'aria-label="{row} over time"' in line]
    found = re.findall(r'var\(--c(\d)\)" d="M(\d+) 0h(\d+)v1h-\3z"', line)
    return [(int(color), int(at), int(width)) for color, at, width in found]


def test_each_stretch_has_the_color_of_what_took_most_of_it(tmp_path: Path) -> None:
    phases = [
        *[(DRIVER, PhaseTime("start", 0.0, 100.0)), (DRIVER, PhaseTime("step 1", 100.0, 60.0))],
        *[(DRIVER, PhaseTime("generate", 100.0, 30.0)), (DRIVER, PhaseTime("wake_up", 100.0, 10.0))],
        *[(DRIVER, PhaseTime("train", 130.0, 30.0)), (ENGINE, PhaseTime("generate", 100.0, 0.04))],
        *[(ENGINE, PhaseTime("asleep", 100.04, 0.06)), (ENGINE, PhaseTime("paused", 150.0, 10.0))],
    ]
    written(tmp_path, phases)
    section = draw_timeline(tmp_path)
    assert "in 60 s." in section  # without the start
    tenth = COLUMNS // 6
    assert stretches(section, "driver") == [
        (6, 0, tenth),  # the inner phase
        (0, tenth, 2 * tenth),
        (1, 3 * tenth, 3 * tenth),
    ]
    assert stretches(section, "engine-0") == [(6, 0, 1), (2, 5 * tenth, tenth)]
    assert re.findall("</i>([a-z ]+)<", section) == ["generate", "train", "sync weights", "sleep and wake up"]


def test_rows_are_in_order_and_some_are_left_out(tmp_path: Path) -> None:
    rows = [Row("engine", 1), *(Row("actor", rank) for rank in reversed(range(30))), DRIVER]
    written(tmp_path, [(row, PhaseTime("train", 5000.0 * number, 1.0)) for number, row in enumerate(rows)])
    section = draw_timeline(tmp_path)
    expected = ["driver", *(f"actor-{rank}" for rank in range(23))]
    assert re.findall(r'aria-label="(\S+) over time"', section) == expected
    assert "8 more rows are in the file." in section
    assert "in 43 h 3 min." in section


def test_a_run_without_a_timeline_has_no_section(tmp_path: Path) -> None:
    assert draw_timeline(tmp_path) == ""
    written(tmp_path, [(DRIVER, PhaseTime("<b>of a plugin</b>", 0.0, 1.0))])
    assert draw_timeline(tmp_path) == ""
