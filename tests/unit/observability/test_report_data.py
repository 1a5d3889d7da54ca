"""Report data from the metrics file: numbers become places, ticks and texts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.observability.jsonl import METRICS_FILE, JsonlTracker
from anygauge.observability.report.catalog import eval_losses, eval_means, phase_metrics
from anygauge.observability.report.metrics_file import Metrics, page_data, read_metrics
from anygauge.observability.report.scale import (
    Range,
    format_number,
    nice_ticks,
    smooth,
    thin,
    tick_labels,
    value_range,
)

FINITE = st.floats(-1e12, 1e12)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / METRICS_FILE


def test_each_metric_is_read_on_the_axis_of_its_group(path: Path) -> None:
    tracker = JsonlTracker(path)
    tracker.log({"train/loss": 0.5, "perf/step_time": 2}, step=1)
    tracker.log({"eval/math": 0.25}, step=1)
    tracker.log({"train/loss": float("nan")}, step=2)
    tracker.close()
    series = read_metrics(path).series
    assert {name: (each.steps, each.values) for name, each in series.items()} == {
        "train/loss": ((1, 2), (0.5, None)),
        "perf/step_time": ((1,), (2,)),
        "eval/math": ((1,), (0.25,)),
    }


def test_the_last_value_of_a_step_counts(path: Path) -> None:
    rows = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0), (3, 30.0)]
    path.write_text("".join(json.dumps({"train/step": s, "train/loss": v}) + "\n" for s, v in rows))
    (series,) = read_metrics(path).series.values()
    assert (series.steps, series.values) == ((1, 2, 3), (1.0, 20.0, 30.0))


def test_broken_lines_are_counted_and_the_rest_is_read(path: Path) -> None:
    good = b'{"train/step": 1, "train/loss": 0.5}\n'
    path.write_bytes(good + b"[1]\n\n\xff\xfe\n" + b'{"train/step": 2, "train/lo')
    metrics = read_metrics(path)
    assert metrics.series["train/loss"].steps == (1,)
    assert metrics.broken_lines == 3


def test_what_is_no_metric_is_left_out(path: Path) -> None:
    row = {"time": 1.5, "train/step": 1, "train/name": "x", "train/flag": True, "eval/no_axis": 1.0}
    path.write_text(json.dumps({**row, "perf/step": "one", "perf/step_time": 1.0}))
    assert not read_metrics(path).series


def test_the_page_has_every_number_to_the_bit(path: Path) -> None:
    values = [0.1 + 0.2, 1e-300, -123456789.123456789, 3]
    tracker = JsonlTracker(path)
    for step, value in enumerate(values):
        tracker.log({"train/loss": value, **({"train/rare": value} if step == 2 else {})}, step=step)
    tracker.close()
    data = json.loads(json.dumps(page_data(read_metrics(path))))
    assert data["every"] == 1
    axis, column = data["metrics"]["train/loss"]
    assert (data["axes"][axis], column) == ([0, 1, 2, 3], values)
    axis, column = data["metrics"]["train/rare"]
    assert (data["axes"][axis], column) == ([2], values[2:3])


def test_data_above_the_bound_are_thinned_and_keep_their_end(path: Path) -> None:
    rows = [{"train/step": s, "train/loss": float(s)} for s in range(1, 2501)]
    rows += [{"eval/step": s, "eval/math": float(s)} for s in range(0, 2500, 100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = page_data(read_metrics(path), most=1000)
    axis, column = data["metrics"]["train/loss"]
    assert data["every"] == 3
    assert column == data["axes"][axis] == list(range(1, 2501, 3))
    assert len(data["metrics"]["eval/math"][1]) == 25


def test_each_axis_has_the_tokens_and_seconds_up_to_its_steps(path: Path) -> None:
    tracker = JsonlTracker(path)
    tracker.log({"eval/math": 0.0}, step=0)
    for step, seconds in ((1, 2.0), (2, 3.0), (3, 1e300), (2, 4.0), (4, 0.25)):
        tracker.log({"perf/step_time": seconds, "perf/tokens_per_s": 10.0}, step=step)
    tracker.log({"eval/math": 1.0}, step=3)
    tracker.log({"eval/math": 1.0}, step=9)
    tracker.close()
    metrics = read_metrics(path)
    data = page_data(metrics)
    assert data["axes"] == [[0, 3, 9], [1, 2, 3, 4]]
    assert data["spent"] == {
        "tokens": [[0.0, 60.0, 62.5], [20.0, 60.0, 60.0, 62.5]],
        "seconds": [[0.0, 6.0, 6.25], [2.0, 6.0, 6.0, 6.25]],
    }
    untimed = Metrics({"other": metrics.series["eval/math"]})
    both = page_data(metrics, untimed)
    assert (len(both["axes"]), both["spent"]) == (3, {})  # equal steps of two runs are two axes


# -------------------------------------------------------------------------
# Scales
# -------------------------------------------------------------------------


@given(FINITE, FINITE, st.integers(3, 10))
def test_ticks_are_few_round_and_inside(one: float, other: float, most: int) -> None:
    shown = value_range([one, other])
    ticks = nice_ticks(shown, most)
    room = 1e-6 * (shown.high - shown.low)
    assert 1 <= len(ticks) <= most + 1
    assert all(shown.low - room <= tick <= shown.high + room for tick in ticks)
    distances = [b - a for a, b in pairwise(ticks)]
    assert all(abs(distance - distances[0]) <= 1e-6 * distances[0] for distance in distances)
    assert len(tick_labels(ticks)) == len(ticks)


@given(st.lists(FINITE, min_size=1, max_size=49))
def test_a_short_series_is_shown_whole(values: list[float]) -> None:
    shown = value_range(values)
    assert shown.low < min(values) <= max(values) < shown.high


def test_a_far_outlier_does_not_set_the_range_of_a_long_series() -> None:
    values = [index / 100 for index in range(100)] + [1e6]
    assert value_range(values).high < 3
    assert value_range([*values[:40], 1e6]).high > 1e6


def test_a_range_keeps_to_what_is_possible() -> None:
    shares = value_range([0.1, 0.6, 1.0], floor=0, ceiling=1)
    assert shares.low == 0
    assert 1 < shares.high < 1.05
    assert value_range([1000.0, 1001.0], floor=0).low > 900
    assert value_range([0.0, 0.0], floor=0).low == 0


@given(st.lists(st.none() | st.floats(-1e3, 1e3), min_size=1, max_size=400), st.integers(4, 60))
def test_thinning_keeps_ends_and_extremes(values: list[float | None], most: int) -> None:
    points = list(enumerate(values))
    kept = thin(points, most)
    assert len(kept) <= max(most, 4)
    assert kept == sorted(kept, key=lambda point: point[0])
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    numbers = [value for value in values if value is not None]
    shown = [value for _, value in kept if value is not None]
    if numbers:
        assert (min(shown), max(shown)) == (min(numbers), max(numbers))


def test_smoothing_is_centered_passes_over_gaps_and_ends_half_a_window_early() -> None:
    line = [(step, float(step)) for step in range(100)]
    assert smooth(line, 11, 1000) == line[5:-5]
    assert smooth([(0, 1.0), (1, None), (2, 3.0)], 3, 10) == [(1, 2.0)]
    assert [step for step, _ in smooth(line, 11, 10)] == list(range(13, 95, 9))
    assert smooth([(1, None)], 1, 10) == [(1, None)]
    noisy = [(step, float(step % 2)) for step in range(99)] + [(99, 50.0)]
    smoothed = smooth(noisy, 11, 1000)
    assert smoothed[-1] == (94, (5 + 50.0) / 11)  # of a whole window: no hook up to the last point
    assert smoothed[0] == (5, 5 / 11)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (-0.123456, "\N{MINUS SIGN}0.123"),
        (1234.5, "1,234"),
        (-1234.5, "\N{MINUS SIGN}1,234"),
        (23456, "23.5k"),
        (1.5e9, "1.5G"),
        (0.00012, "1.2e\N{MINUS SIGN}4"),
        (1e-300, "1e\N{MINUS SIGN}300"),
    ],
)
def test_numbers_read_well(value: float, text: str) -> None:
    assert format_number(value) == text


def test_tick_labels_share_their_decimals() -> None:
    assert tick_labels([0.0, 0.25, 0.5]) == ["0", "0.25", "0.50"]
    assert tick_labels([0.0, 20000.0, 40000.0]) == ["0", "20k", "40k"]
    assert tick_labels([0.0, 1e-7]) == ["0", "1e\N{MINUS SIGN}7"]


def test_ranges_place_values() -> None:
    assert [Range(-1, 3).fraction(value) for value in (-1, 0, 3)] == [0, 0.25, 1]


# -------------------------------------------------------------------------
# Names
# -------------------------------------------------------------------------


def test_evaluation_means_are_told_from_what_else_is_said_of_a_data_set() -> None:
    names = ["eval/math", "eval/math-hard", "eval/math-truncated_ratio", "eval/math-samples"]
    names += ["eval/math-failed_ratio", "eval/math/response_len/mean", "train/loss", "eval/math-loss"]
    found = eval_means(dict.fromkeys(names))
    assert found == [("eval/math", "math"), ("eval/math-hard", "math-hard")]
    assert eval_losses(dict.fromkeys(names)) == [("eval/math-loss", "math")]


def test_phases_come_in_the_order_of_a_step() -> None:
    names = ["perf/overhead_time", "perf/mine_time", "perf/train_time", "perf/step_time", "perf/rollout_time"]
    labels = [label for _, label in phase_metrics(dict.fromkeys(names))]
    assert labels == ["rollout", "train", "mine", "overhead"]
