"""Limits by precision, and what is above them."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.observability.health import HEALTH_FILE, read_events
from anygauge.trainer.health import HealthMonitor, health_metrics
from anygauge_hooks.errors import HealthError


def config(**sections: Any) -> Config:
    tree = {"run": {"name": "t"}, "model": {"path": "m"}, "data": {"train": []}, **sections}
    return Config.model_validate(tree)


def diff(value: float) -> dict[str, float]:
    return {"health/logprob_abs_diff": value}


def test_only_tokens_of_the_weights_being_trained_are_a_measure() -> None:
    assert health_metrics({"on_policy_abs_diff": 3.0, "on_policy_tokens": 4.0}) == diff(0.75)
    assert health_metrics({"on_policy_abs_diff": 0.0, "on_policy_tokens": 0.0, "loss": 1.0}) == {}
    assert health_metrics({"value_loss": 1.0}) == {}  # a step that trains the critic alone


def test_the_terminal_is_warned_once_and_the_file_has_every_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "anygauge")
    monitor = HealthMonitor(config(), tmp_path)
    for step, value in enumerate((5e-5, 2e-4, 3e-4, 5e-5, 9e-4), 1):
        monitor.check({"train/loss": 1.0, **diff(value)}, step)
    monitor.check({"train/loss": 1.0}, 6)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert "Step 2" in caplog.text
    assert "logprob_abs_diff_warning = 0.0001 (float32)" in caplog.text
    events, broken = read_events(tmp_path)
    assert broken == 0
    assert [(event.step, event.level, event.value) for event in events] == [
        *[(2, "warning", 2e-4), (3, "warning", 3e-4), (5, "warning", 9e-4)]
    ]


@pytest.mark.parametrize("value", [1.1e-3, math.inf, math.nan])
def test_what_is_above_the_limit_or_no_number_ends_the_run(tmp_path: Path, value: float) -> None:
    with pytest.raises(HealthError, match=r"logprob_abs_diff_error = 0\.001") as raised:
        HealthMonitor(config(), tmp_path).check(diff(value), 7)
    assert '"none"' in str(raised.value)
    ((event,), _) = read_events(tmp_path)
    assert (event.step, event.level) == (7, "error")
    assert event.value == (value if math.isfinite(value) else None)


def test_limits_that_are_off(tmp_path: Path) -> None:
    off = {"logprob_abs_diff_warning": None, "logprob_abs_diff_error": None}
    HealthMonitor(config(health=off), tmp_path).check(diff(math.nan), 1)
    assert not (tmp_path / HEALTH_FILE).exists()


def test_a_line_that_was_cut_short_is_counted(tmp_path: Path) -> None:
    HealthMonitor(config(), tmp_path).check(diff(2e-4), 1)
    path = tmp_path / HEALTH_FILE
    path.write_text(path.read_text() + '{"step": 2, "lev')
    events, broken = read_events(tmp_path)
    assert ([event.step for event in events], broken) == ([1], 1)


def test_a_file_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / HEALTH_FILE).mkdir()
    HealthMonitor(config(), tmp_path).check(diff(2e-4), 1)
    assert "cannot be written" in caplog.text
