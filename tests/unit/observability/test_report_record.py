"""How a run stands, from what its observers recorded; and that they never fail it."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.observability.jsonl import METRICS_FILE, JsonlTracker
from anygauge.observability.report import REPORT_FILE, plugin, write_report
from anygauge.observability.report.run_files import read_run
from anygauge.observability.report.run_record import RECORD_FILE, begin_part, read_record
from anygauge.observability.report.summary import facts, standing, verdict
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.types import RunInfo

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)
WriteParts = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path) -> RunInfo:
    config = Config.model_validate(
        {
            "run": {"name": "demo", "steps": 40},
            "model": {"path": "/models/org/tiny"},
            "data": {"train": [{"path": "a.jsonl"}, {"path": "b.jsonl", "name": "second"}]},
            "reward": {"function": "math"},
        }
    )
    (tmp_path / "config.toml").write_text(
        '[run]\nname = "demo"\nsteps = 40\ntask = "rl"\n[model]\npath = "/models/org/tiny"\n'
        '[data]\ntrain = [{ path = "/data/a.jsonl" }, { path = "b.jsonl", name = "second" }]\n'
        '[reward.parts.one]\nfunction = "math"\n[reward.parts.two]\nfunction = "f1"\n'
    )
    return RunInfo(name="demo", directory=str(tmp_path), backend="cpu", total_steps=40, config=config)


@pytest.fixture
def write_parts(tmp_path: Path) -> WriteParts:
    """Return a function that writes ``run.json`` with the given parts of a run."""

    def write(*parts: dict[str, Any]) -> None:
        here = {"host": socket.gethostname(), "pid": os.getpid(), "started": NOW.isoformat()}
        (tmp_path / RECORD_FILE).write_text(json.dumps({"parts": [here | part for part in parts]}))

    return write


def log_step(run: RunInfo, step: int) -> None:
    tracker = JsonlTracker(Path(run.directory) / METRICS_FILE)
    tracker.log({"train/loss": 0.5}, step=step)
    tracker.close()


def test_a_run_is_recorded_from_its_begin_to_its_end(run: RunInfo, tmp_path: Path) -> None:
    plugin.before_train(run=run)
    log_step(run, 3)
    assert standing(read_run(tmp_path)).text == "running"
    plugin.after_train(run=replace(run, step=40))
    found = standing(read_run(tmp_path))
    assert (found.kind, found.step, found.total) == ("finished", 40, 40)
    assert "finished" in (tmp_path / REPORT_FILE).read_text()
    (part,) = (read_record(tmp_path) or {})["parts"]
    assert part["started"] <= part["ended"]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({}, "Running: step 10 of 40, about 1 min 00 s left."),  # 5 steps of this part took 10 s
        ({"outcome": "failed", "ended": "2026-01-02T12:00:07+00:00"}, "Failed after step 10 of 40 in 7 s."),
        ({"outcome": "interrupted"}, "Interrupted after step 10 of 40"),
        ({"pid": 2**22 + 1}, "Killed after step 10 of 40"),
        ({"host": "elsewhere"}, "At step 10 of 40, last heard of on elsewhere."),
    ],
)
def test_the_verdict_says_how_far_a_run_got(
    run: RunInfo, tmp_path: Path, write_parts: WriteParts, part: dict[str, Any], text: str
) -> None:
    now = datetime.now(UTC) + timedelta(hours=1)
    started = NOW if "ended" in part else now - timedelta(seconds=10)
    write_parts({"from_step": 5, "started": started.isoformat()} | part)
    log_step(run, 10)
    assert verdict(read_run(tmp_path), now)[0].startswith(text)


def test_the_report_of_a_running_run_is_written_now_and_then(
    run: RunInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(plugin.time, "monotonic", lambda: clock[-1])
    page = tmp_path / REPORT_FILE
    plugin.before_train(run=run)
    for seconds, is_due in ((129.0, False), (130.0, True), (159.0, False), (160.0, True)):
        clock.append(seconds)
        page.unlink(missing_ok=True)
        plugin.after_train_step(run=run, metrics={})
        assert page.exists() is is_due
    assert "Running" in page.read_text()
    clock.append(300.0)
    with monkeypatch.context() as slow:
        slow.setattr(plugin, "write_report", lambda directory: clock.append(302.0))
        plugin.after_train_step(run=run, metrics={})
    for seconds, is_due in ((401.0, False), (402.0, True)):  # 2 s are 2 % of 100 s
        clock.append(seconds)
        page.unlink(missing_ok=True)
        plugin.after_train_step(run=run, metrics={})
        assert page.exists() is is_due
    tmp_path.rename(moved := tmp_path.with_name("moved"))
    tmp_path.mkdir()  # another run's
    (tmp_path / "config.toml").touch()
    clock.append(500.0)
    plugin.after_train_step(run=run, metrics={})
    assert not page.exists()
    shutil.rmtree(tmp_path)
    moved.rename(tmp_path)
    plugin.after_train(run=run)
    plugin.after_train_step(run=run, metrics={})
    assert "Running" not in page.read_text()


def test_the_error_that_ended_a_run_heads_its_page(run: RunInfo, tmp_path: Path) -> None:
    plugin.before_train(run=run)
    plugin.on_error(run=run, error=RolloutError("The engine is <gone>.", hint="Start it."))
    plugin.after_train(run=replace(run, step=7))
    found = standing(read_run(tmp_path))
    assert (found.kind, found.step) == ("failed", 7)
    assert found.error == "RolloutError: The engine is <gone>.\n  Start it.\n  [AG401]"
    assert "RolloutError: The engine is &lt;gone&gt;." in (tmp_path / REPORT_FILE).read_text()


def test_an_interrupt_is_no_failure(run: RunInfo, tmp_path: Path) -> None:
    plugin.before_train(run=run)
    plugin.on_error(run=run, error=KeyboardInterrupt())
    plugin.after_train(run=run)
    found = standing(read_run(tmp_path))
    assert (found.kind, found.text, found.error) == ("stopped", "interrupted", "KeyboardInterrupt: ")


def test_a_run_that_fails_before_its_first_step_is_recorded(run: RunInfo, tmp_path: Path) -> None:
    plugin.on_error(run=run, error=MemoryError("no room"))
    plugin.after_train(run=run)
    assert standing(read_run(tmp_path)).error == "MemoryError: no room"
    assert "MemoryError: no room" in (tmp_path / REPORT_FILE).read_text()


def test_a_resume_that_fails_before_its_first_step_changes_nothing(run: RunInfo, tmp_path: Path) -> None:
    plugin.before_train(run=run)
    plugin.after_train(run=replace(run, step=40))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    plugin.on_error(run=run, error=MemoryError())
    plugin.after_train(run=run)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_resumed_run_has_a_part_for_each_start(run: RunInfo, tmp_path: Path) -> None:
    begin_part(run)
    plugin.before_train(run=replace(run, step=20))
    plugin.after_train(run=replace(run, step=40))
    known = dict(facts(read_run(tmp_path), datetime.now(UTC) + timedelta(seconds=90)))
    assert known["parts"] == "2; resumed after step 20"
    assert [part["from_step"] for part in (read_record(tmp_path) or {})["parts"]] == [0, 20]


def test_no_report_where_none_is_wanted(
    run: RunInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run.config.model_copy(update={"run": run.config.run.model_copy(update={"report": False})})
    run = replace(run, config=config)
    plugin.before_train(run=run)
    monkeypatch.setattr(plugin.time, "monotonic", lambda: math.inf)
    plugin.after_train_step(run=run, metrics={})
    plugin.after_train(run=run)
    assert not (tmp_path / REPORT_FILE).exists()
    assert (tmp_path / RECORD_FILE).exists()


def test_what_cannot_be_written_is_a_warning(
    run: RunInfo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = replace(run, directory=str(tmp_path / "gone"))
    with caplog.at_level(logging.WARNING):
        plugin.before_train(run=gone)
        plugin.after_train(run=gone)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"run.json of {gone.directory} cannot be written",
        f"the report of {gone.directory} was not written",
    ]


# -------------------------------------------------------------------------
# Standing
# -------------------------------------------------------------------------


def test_a_run_whose_process_is_gone_was_killed(
    run: RunInfo, tmp_path: Path, write_parts: WriteParts
) -> None:
    write_parts({"pid": 2**22 + 1})
    log_step(run, 5)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "driver.log").write_text("".join(f"line {n}\n" for n in range(100)))
    files = read_run(tmp_path)
    found = standing(files)
    assert (found.kind, found.text, found.step) == ("stopped", "killed", 5)
    assert files.log_tail.splitlines() == [f"line {n}" for n in range(70, 100)]


def test_another_process_with_the_number_of_the_run_is_not_the_run(
    tmp_path: Path, run: RunInfo, write_parts: WriteParts
) -> None:
    write_parts({"started": "2000-01-01T00:00:00+00:00"})
    assert standing(read_run(tmp_path)).text == "killed"


def test_of_a_run_on_another_host_only_the_host_is_known(
    tmp_path: Path, run: RunInfo, write_parts: WriteParts
) -> None:
    write_parts({"host": "node-7"})
    assert standing(read_run(tmp_path)).text == "last heard of on node-7"


@pytest.mark.parametrize(("step", "kind"), [(39, "unknown"), (40, "finished")])
def test_without_a_record_the_metrics_tell(step: int, kind: str, run: RunInfo, tmp_path: Path) -> None:
    log_step(run, step)
    assert standing(read_run(tmp_path)).kind == kind


@pytest.mark.parametrize(
    ("seconds", "text"), [(7, "7 s"), (67, "1 min 07 s"), (3600, "1 h 00 min"), (90_000, "1 d 1 h")]
)
def test_the_facts_say_what_the_run_is(
    seconds: int, text: str, run: RunInfo, tmp_path: Path, write_parts: WriteParts
) -> None:
    write_parts({"ended": (NOW + timedelta(seconds=seconds)).isoformat(), "outcome": "finished"})
    assert dict(facts(read_run(tmp_path), NOW)) == {
        "model": "org/tiny",
        "data": "a.jsonl, second",
        "reward": "one + two",
        "task": "rl",
        "started": "2026-01-02 12:00 UTC",
        "took": text,
    }


def test_the_time_of_a_part_that_was_killed_is_not_known(
    run: RunInfo, tmp_path: Path, write_parts: WriteParts
) -> None:
    write_parts({}, {"ended": (NOW + timedelta(seconds=5)).isoformat()})
    assert dict(facts(read_run(tmp_path), NOW))["took"] == "at least 5 s"


@pytest.mark.parametrize("odd", ["7", 1.5, True, [], {}, None])
def test_values_of_another_type_count_as_missing(tmp_path: Path, run: RunInfo, odd: Any) -> None:
    keys = ("started", "ended", "host", "pid", "outcome", "step", "from_step", "error")
    part = dict.fromkeys(keys, odd)
    record = {"name": "demo", "backend": odd, "total_steps": odd, "parts": [part, part]}
    (tmp_path / RECORD_FILE).write_text(json.dumps(record))
    table = {"hooks": odd, "kernels": odd, "plugin_errors": odd, "backend": odd}
    (tmp_path / "capabilities.json").write_text(json.dumps(table))
    (tmp_path / "config.toml").write_text("[run]\nsteps = 40\n[reward]\nparts = 3\n")
    found = standing(read_run(tmp_path))
    assert (found.kind, found.step, found.total) in {("unknown", 0, 40), ("stopped", 0, 40)}
    assert write_report(tmp_path).is_file()
