"""The timeline of a run: as a trace that grows, and as a drawing in the report."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from anygauge.observability.phases import PhaseTime, Row, record_phase, take_phases
from anygauge.observability.report import timeline as drawing
from anygauge.observability.report.timeline import ACTIVITIES, COLUMNS, TimelineView, draw_timeline
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


@pytest.mark.parametrize("lost", [b"\0" * 20_000, b'{"name":"' + b"x" * 5000])
def test_a_loss_of_power_leaves_what_was_whole(tmp_path: Path, lost: bytes) -> None:
    path = written(tmp_path, [(DRIVER, PhaseTime("train", 1.0, 1.0))])
    path.write_bytes(path.read_bytes()[:-3] + b",\n" + lost)
    Timeline(path).close()
    assert complete(path) == [(1, "train")]


def test_a_full_disk_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        timeline = Timeline(tmp_path / "no" / "such" / TIMELINE_FILE)
        timeline.add(DRIVER, [PhaseTime("train", 1.0, 1.0)])
        timeline.close()
    (record,) = caplog.records
    assert "timeline.json is not written any more: [Errno 2]" in record.message


def test_lines_that_are_no_phase_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, [(ACTOR, PhaseTime("train", 1.5, 0.5))])
    garbage = ["nonsense,", "{}", '{"ph":"X"}', "[1]", "[" * 100_000]
    for odd in ('"pid":9', '"ts":NaN', '"dur":1e400', f'"ts":1{"0" * 400}'):
        garbage.append('{"name":"a","ph":"X","pid":1,"tid":0,"ts":0,"dur":0,' + odd + "},")
    path.write_text("\n".join([*garbage, path.read_text()]))
    assert read_events(path, most_bytes=MANY) == [(ACTOR, PhaseTime("train", 1.5, 0.5))]
    assert read_events(path, most_bytes=10) == []


# -------------------------------------------------------------------------
# The drawing
# -------------------------------------------------------------------------


def drawn(directory: Path) -> TimelineView:
    view = draw_timeline(directory)
    assert view is not None
    return view


def test_each_stretch_has_the_color_of_what_took_most_of_it(tmp_path: Path) -> None:
    phases = [
        *[(DRIVER, PhaseTime("start", 0.0, 100.0)), (DRIVER, PhaseTime("step 1", 100.0, 60.0))],
        *[(DRIVER, PhaseTime("generate", 100.0, 30.0)), (DRIVER, PhaseTime("wake_up", 100.0, 10.0))],
        *[(DRIVER, PhaseTime("train", 130.0, 30.0)), (ENGINE, PhaseTime("generate", 100.0, 0.04))],
        *[(ENGINE, PhaseTime("asleep", 100.04, 0.06)), (ENGINE, PhaseTime("paused", 150.0, 10.0))],
    ]
    written(tmp_path, phases)
    view = drawn(tmp_path)
    assert (view.shown, view.is_end, view.breaks) == ("1 min 00 s", False, [])  # without the start
    tenth = COLUMNS // 6
    assert view.rows["driver"] == [
        (0, tenth, 6),  # the inner phase
        (tenth, 2 * tenth, 0),
        (3 * tenth, 3 * tenth, 1),
    ]
    assert view.rows["engine-0"] == [(0, 1, 6), (5 * tenth, tenth, 2)]
    labels = ["generate", "train", "sync weights", "sleep and wake up"]
    assert [activity.label for activity in view.activities] == labels


def test_rows_are_in_order_and_some_are_left_out(tmp_path: Path) -> None:
    rows = [Row("engine", 1), *(Row("actor", rank) for rank in reversed(range(30))), DRIVER]
    written(tmp_path, [(row, PhaseTime("train", float(number), 1.0)) for number, row in enumerate(rows)])
    view = drawn(tmp_path)
    assert list(view.rows) == ["driver", *(f"actor-{rank}" for rank in range(23))]
    assert (view.left_out, view.shown) == (8, "32 s")


def test_the_break_before_a_resume_is_cut_out_and_marked(tmp_path: Path) -> None:
    day = 86400.0
    parts = [(DRIVER, PhaseTime("train", 10.0, 50.0)), (DRIVER, PhaseTime("start", 60 + 2 * day, 5.0))]
    parts += [(ACTOR, PhaseTime("generate", 66 + 2 * day, 44.0)), (DRIVER, PhaseTime("start", 0.0, 1.0))]
    written(tmp_path, parts)
    view = drawn(tmp_path)
    assert (view.shown, view.breaks) == ("1 min 40 s", [(COLUMNS / 2, "2 d 0 h")])  # not the second before 66
    assert view.rows == {"driver": [(0, 300, 1), (300, 30, 7)], "actor-1": [(336, 264, 0)]}


def test_a_break_is_long_beside_the_time_that_passed_and_not_that_of_all_rows(tmp_path: Path) -> None:
    starts = [(Row("actor", rank), start) for rank in range(10) for start in (0.0, 12.5)]
    written(tmp_path, [(row, PhaseTime("train", start, 10.0)) for row, start in starts])
    assert drawn(tmp_path).shown == "20 s"


def test_the_end_of_a_long_run_is_said_to_be_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, [(DRIVER, PhaseTime("train", float(step), 1.0)) for step in range(100)])
    monkeypatch.setattr(drawing, "MOST_BYTES", 1000)
    view = drawn(tmp_path)
    assert view.is_end
    assert 5 <= int(view.shown.removesuffix(" s")) <= 20


def test_no_activity_has_the_color_of_what_was_lost() -> None:
    colors = [activity.color for activity in ACTIVITIES]
    assert len(set(colors)) == len(colors)


def test_a_run_without_a_timeline_has_no_section(tmp_path: Path) -> None:
    assert draw_timeline(tmp_path) is None
    written(tmp_path, [(DRIVER, PhaseTime("<b>of a plugin</b>", 0.0, 1.0))])
    assert draw_timeline(tmp_path) is None
