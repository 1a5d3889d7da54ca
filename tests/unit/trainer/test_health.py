"""Limits by precision, what ends a run, and what the file and the log say."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.health.record import HEALTH_FILE, Health, read_health
from anygauge.observability.jsonl import METRICS_FILE, JsonlTracker
from anygauge.trainer.health import HealthMonitor, health_metrics
from anygauge.trainer.saving import save_on_error
from anygauge_hooks.errors import HealthError, WorkerDiedError


def config(**sections: Any) -> Config:
    tree = {"run": {"name": "t"}, "model": {"path": "m"}, "data": {"train": []}, **sections}
    return Config.model_validate(tree)


def stops(*names: str) -> Config:
    return config(run={"name": "t", "stop_on": names})


def diff(value: float) -> dict[str, float]:
    return {"health/logprob_abs_diff": value}


def health(directory: Path) -> Health:
    found = read_health(directory)
    assert found is not None
    return found


def test_only_tokens_of_the_weights_being_trained_are_a_measure() -> None:
    assert health_metrics({"on_policy_abs_diff": 3.0, "on_policy_tokens": 4.0}) == diff(0.75)
    assert health_metrics({"on_policy_abs_diff": 0.0, "on_policy_tokens": 0.0, "loss": 1.0}) == {}
    assert health_metrics({"value_loss": 1.0}) == {}  # a step that trains the critic alone


def test_the_terminal_is_warned_of_changes_and_the_file_has_every_rule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "anygauge")
    monitor = HealthMonitor(config(), tmp_path)
    for step, value in enumerate((5e-5, 2e-4, 3e-4, 5e-4, *[5e-5] * 4), 1):
        monitor.check({"rollout/lag/max": 0, **diff(value)}, step)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "Step 2" in caplog.text
    assert "logprob_abs_diff_warning = 0.0001 nats (float32)" in caplog.text
    found = health(tmp_path)
    assert (found.step, found.status, found.stopped_by) == (8, "warning", None)
    (firing,) = found.firing
    assert (firing.rule, firing.since, firing.steps, firing.value, firing.worst) == (
        *("logprob_abs_diff", 2, 3, 5e-5, 5e-4),
    )
    assert firing.text == found.changes[-1].text
    monitor.check(diff(5e-5), 9)
    assert [(change.step, change.kind) for change in health(tmp_path).changes] == [
        *[(2, "fires"), (4, "worsens"), (9, "clears")]
    ]
    assert health(tmp_path).status == "ok"
    states = {rule.rule: rule.state for rule in health(tmp_path).rules}
    assert (states["stale_weights"], states["truncation"]) == ("ok", "no data")


@pytest.mark.parametrize("value", [1.1e-3, math.inf, math.nan])
def test_what_is_above_the_limit_or_no_number_ends_the_run(
    tmp_path: Path, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(HealthError, match=r"^Step 7: .*logprob_abs_diff_error = 0\.001 nats") as raised:
        HealthMonitor(config(), tmp_path).check(diff(value), 7)
    assert '"none"' in str(raised.value)
    assert not caplog.records  # the error says it
    found = health(tmp_path)
    assert (found.step, found.status, found.stopped_by) == (7, "stopped", "logprob_abs_diff")
    assert found.firing[0].value == (value if math.isfinite(value) else None)


def test_a_rule_that_the_user_names_ends_the_run_and_no_other(tmp_path: Path) -> None:
    bad = {"rollout/lag/max": 3.0, **diff(2e-4)}
    HealthMonitor(stops("truncation"), tmp_path).check(bad, 1)
    with pytest.raises(HealthError, match=r"^Step 4: tokens were sampled with weights 3 versions") as raised:
        HealthMonitor(stops("truncation", "stale_weights"), tmp_path).check(bad, 4)
    assert "run.stop_on names stale_weights" in str(raised.value)
    found = health(tmp_path)
    assert (found.status, found.stopped_by) == ("stopped", "stale_weights")
    assert {rule.rule for rule in found.firing} == {"logprob_abs_diff", "stale_weights"}


def test_the_error_says_where_the_run_can_go_on(tmp_path: Path) -> None:
    def hint(every: int | None) -> str:
        loop: Any = SimpleNamespace(
            config=config(save={"every": every}),
            checkpoints=None,
            directory=SimpleNamespace(path=tmp_path, check=lambda: None),
            session=SimpleNamespace(workers=SimpleNamespace(is_ended=False)),
            first_step=9,
            info=SimpleNamespace(step=10),
        )
        with pytest.raises(HealthError) as raised, save_on_error(loop, 10):
            raise HealthError("Step 10: bad.", hint="Mend it.")
        return str(raised.value.hint)

    nothing = "Mend it.\n  There is no checkpoint: --resume starts again at step 1."
    assert hint(20) == nothing  # as at the first step
    assert hint(None) == f"{nothing} Set save.every to save checkpoints."
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)  # of an earlier part of the run
    assert hint(None) == hint(20) == "Mend it.\n  --resume goes on from the last checkpoint."


@pytest.mark.parametrize("are_ended", [False, True])
def test_an_error_is_raised_also_where_nothing_can_be_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, are_ended: bool
) -> None:
    told: list[str] = []

    def dead(*_: object, **__: object) -> None:
        raise WorkerDiedError("rank 0 is dead")

    loop: Any = SimpleNamespace(
        config=config(),
        checkpoints=SimpleNamespace(complete=0, writing=None, start=dead),
        directory=SimpleNamespace(path=tmp_path, check=lambda: None),
        session=SimpleNamespace(
            workers=SimpleNamespace(is_ended=are_ended),
            state=SimpleNamespace(state_dict=dict, info=None),
            plugins=SimpleNamespace(notify=lambda *_, message, **__: told.append(message)),
        ),
        first_step=1,
        info=SimpleNamespace(step=2),
    )
    with pytest.raises(ZeroDivisionError), save_on_error(loop, 2):
        raise ZeroDivisionError
    assert told == ([] if are_ended else ["saving step 2 after ZeroDivisionError"])
    warning = ["step 2 could not be saved: rank 0 is dead\n  [AG701]"]
    assert caplog.messages[-1:] == ([] if are_ended else warning)


def test_limits_that_are_off(tmp_path: Path) -> None:
    off = {
        "logprob_abs_diff_warning": None,
        "logprob_abs_diff_error": None,
        "limits": {"stale_weights": None},
    }
    HealthMonitor(config(health=off), tmp_path).check({**diff(math.nan), "rollout/lag/max": 9}, 1)
    found = health(tmp_path)
    assert found.status == "ok"
    assert {rule.rule for rule in found.rules if rule.state == "off"} == {"logprob_abs_diff", "stale_weights"}


def test_a_resumed_run_goes_on_where_its_metrics_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rule over ten steps does not start over, and no warning is repeated."""
    tracker, whole = JsonlTracker(tmp_path / METRICS_FILE), HealthMonitor(config(), tmp_path)
    steps = [{"rollout/truncated_ratio": 0.7, "rollout/lag/max": 3 if step == 3 else 0} for step in range(12)]
    for step, metrics in enumerate(steps, 1):
        tracker.log(metrics, step=step)
        whole.check(metrics, step)
    tracker.close()
    expected = (tmp_path / HEALTH_FILE).read_text()
    told = [record.getMessage() for record in caplog.records]
    caplog.clear()
    with pytest.raises(HealthError):
        HealthMonitor(stops("stale_weights"), tmp_path).check({"rollout/lag/max": 3}, 9)
    resumed = HealthMonitor(config(), tmp_path, step=8)
    begun = health(tmp_path)
    assert (begun.step, begun.status, begun.stopped_by) == (8, "warning", None)
    assert [change.step for change in begun.changes] == [4]
    assert not caplog.records
    for step, metrics in enumerate(steps[8:], 9):
        resumed.check(metrics, step)
    assert (tmp_path / HEALTH_FILE).read_text() == expected
    assert [record.getMessage() for record in caplog.records] == told[-2:]


def test_the_file_is_whole_or_not_there(tmp_path: Path) -> None:
    assert read_health(tmp_path) is None
    HealthMonitor(config(), tmp_path).check(diff(2e-4), 1)
    assert [path.name for path in tmp_path.iterdir()] == [HEALTH_FILE]
    assert json.loads((tmp_path / HEALTH_FILE).read_text())["status"] == "warning"
    (tmp_path / HEALTH_FILE).write_text('{"step": 2, "st')
    with pytest.raises(ValueError, match="JSON"):
        read_health(tmp_path)


def test_a_file_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / HEALTH_FILE).mkdir()
    HealthMonitor(config(), tmp_path).check(diff(2e-4), 1)
    assert "cannot be written" in caplog.text
