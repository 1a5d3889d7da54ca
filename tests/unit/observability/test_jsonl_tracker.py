"""One valid JSON object per call, on disk when the call returns."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anygauge.observability import plugin
from anygauge.observability.jsonl import METRICS_FILE, JsonlTracker
from anygauge_hooks.types import RunInfo, Tracker


@pytest.fixture
def run(tmp_path: Path) -> RunInfo:
    return RunInfo(name="r", directory=str(tmp_path), backend="cpu", total_steps=3, config=None)


def make(run: RunInfo) -> Tracker:
    specs = {spec.name: spec for spec in plugin.register_trackers()}
    return specs["jsonl"].make(run)


def rows(run: RunInfo) -> list[Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (Path(run.directory) / METRICS_FILE).read_text().splitlines()
    found = [json.loads(line, parse_constant=refuse) for line in lines]
    times = [row.pop("time") for row in found]
    assert times == sorted(times), "in seconds since 1970"
    return found


def test_a_call_is_a_line_with_its_steps(run: RunInfo) -> None:
    tracker = make(run)
    tracker.log({"train/loss": 0.5, "perf/step_time": 1.5}, step=2)
    tracker.log({"eval/gsm8k": 0.25}, step=2)
    assert rows(run) == [
        {"train/step": 2, "perf/step": 2, "train/loss": 0.5, "perf/step_time": 1.5},
        {"eval/step": 2, "eval/gsm8k": 0.25},
    ]
    tracker.close()


def test_what_is_not_finite_is_null(run: RunInfo) -> None:
    tracker = make(run)
    tracker.log({"train/a": math.nan, "train/b": math.inf, "train/c": -math.inf, "train/d": 0}, step=1)
    assert rows(run) == [{"train/step": 1, "train/a": None, "train/b": None, "train/c": None, "train/d": 0}]
    tracker.close()


def test_numbers_of_array_libraries_are_plain(run: RunInfo) -> None:
    tracker = make(run)
    tracker.log({"train/a": np.float32(0.5), "train/b": torch.tensor(math.nan)}, step=1)  # type: ignore[dict-item]
    assert rows(run) == [{"train/step": 1, "train/a": 0.5, "train/b": None}]
    tracker.close()


def test_a_line_says_when(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / METRICS_FILE, clock=lambda: 1767225600.25)
    tracker.log({"train/loss": 0.5}, step=1)
    tracker.close()
    assert (
        tmp_path / METRICS_FILE
    ).read_text() == '{"time": 1767225600.25, "train/step": 1, "train/loss": 0.5}\n'


def test_a_line_that_a_kill_cut_short_spoils_no_other(run: RunInfo) -> None:
    path = Path(run.directory) / METRICS_FILE
    path.write_text('{"train/step": 1, "train/loss": 0.5}\n{"train/step": 2, "tra')
    tracker = make(run)
    tracker.log({"train/loss": 0.25}, step=2)
    tracker.close()
    first, broken, second = path.read_text().splitlines()
    assert json.loads(first)["train/step"] == 1
    assert broken == '{"train/step": 2, "tra'
    assert json.loads(second)["train/loss"] == 0.25


def test_no_metrics_are_no_line(run: RunInfo) -> None:
    tracker = make(run)
    tracker.log({}, step=1)
    assert rows(run) == []
    tracker.close()


def test_a_second_tracker_continues_the_file(run: RunInfo) -> None:
    for step in (1, 2):
        tracker = make(run)
        tracker.log({"train/loss": 0.5}, step=step)
        tracker.close()
    assert [row["train/step"] for row in rows(run)] == [1, 2]
