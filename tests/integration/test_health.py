"""Runs whose rollout engine computes other log-probs than the trainer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_config
from anygauge.health.record import Health, read_health
from anygauge.plugins import load_plugins
from anygauge.trainer.run import train
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import HealthError
from anygauge_hooks.types import NamedFunction, RunInfo
from anygauge_tests.recipe import tiny_recipe

MODULE = "engines_of_a_test"
SOURCE = """
def shifted(sample, by):
    return sample._replace(log_probs=tuple(each + by for each in sample.log_probs))

def off_from_step_2(sample, prompt):
    return shifted(sample, 0.01) if 1 in sample.weight_versions else None

def off_and_stale(sample, prompt):
    # half of the samples of step 2 are of the step before, in part
    if 1 in sample.weight_versions and sample.seed // 2 % 2:
        versions = (0, *sample.weight_versions[1:])
        return shifted(sample, 1.0)._replace(weight_versions=versions)
    return shifted(sample, 5e-4)
"""
Run = Callable[..., RunInfo]


class Digits:
    """Brings a reward from which there is something to learn."""

    @hookimpl
    def register_reward_functions(self) -> list[NamedFunction]:
        return [NamedFunction(name="digits", fn=self.digits, inline=True)]

    def digits(self, response: str) -> float:
        return float(sum(character.isdigit() for character in response))


@pytest.fixture
def run(tmp_path: Path, forked_actors: None, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that trains, with keys of the config set otherwise."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny_recipe(
        tmp_path,
        model={"hidden": 16, "layers": 1, "heads": 2, "head_dim": 8, "mlp": 16},
        run__progress=False,
        reward__function="digits",
        train__optimizer_steps=2,
        train__lr=0.1,  # so that a second optimizer step has other log-probs
        save__hf_at_end=False,
    )

    def start(**keys: Any) -> RunInfo:
        plugins = load_plugins()
        plugins.register(Digits(), "digits")
        given = [(name.replace("__", "."), value) for name, value in keys.items()]
        return train(load_config(config, given, backend="cpu", plugins=plugins), plugins)

    return start


def differences(directory: Path) -> list[float]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row["health/logprob_abs_diff"] for row in rows if "health/logprob_abs_diff" in row]


def health(directory: Path) -> Health:
    found = read_health(directory)
    assert found is not None
    return found


def test_engines_that_agree(run: Run, tmp_path: Path) -> None:
    run()
    found = differences(tmp_path / "run")
    assert len(found) == 2
    assert max(found) < 1e-5
    assert (health(tmp_path / "run").step, health(tmp_path / "run").status) == (2, "ok")


def test_an_engine_with_another_model_stops_the_run_before_anything_is_learned(
    run: Run, tmp_path: Path
) -> None:
    """An engine that computes in bfloat16 is far from a trainer in float32, by the limit of float32."""
    with pytest.raises(HealthError, match=r"^Step 1: .*logprob_abs_diff_error = 0\.001") as raised:
        run(rollout__dtype="bfloat16", health__logprob_abs_diff_error=1e-3)
    assert "--resume starts again at step 1.\n" in str(raised.value)
    directory = tmp_path / "run"
    (found,) = differences(directory)
    assert 1e-3 < found < 0.1
    assert not list((directory / "checkpoints").glob("step-*"))
    report = (directory / "report.html").read_text()
    assert report.count("Step 1: trainer and rollout engine disagree") == 2  # what ended it, and its health
    assert "Stopped by the rule logprob_abs_diff after step 1." in report
    assert json.loads((directory / "run.json").read_text())["parts"][-1]["outcome"] == "failed"


def test_a_run_that_is_stopped_later_keeps_what_it_learned(run: Run, tmp_path: Path) -> None:
    """Beside the last checkpoint of a step that was well, though only one is to be kept."""
    off = {"rollout__after_sample": [f"{MODULE}:off_from_step_2"]}
    keys = {"run__steps": 3, "save__every": 1, "save__keep": 1, **off}
    with pytest.raises(HealthError, match=r"^Step 2: "):
        run(**keys)
    directory = tmp_path / "run"
    checkpoints = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert checkpoints == ["step-00000001", "step-00000002"]
    info = run(**keys, run__resume=True, health__logprob_abs_diff_error="none")
    assert info.step == 3
    assert differences(directory) == pytest.approx([0, 0.01, 0], abs=1e-5)
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step-00000003"]


def test_tokens_of_older_weights_do_not_count(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(rollout__after_sample=[f"{MODULE}:off_and_stale"])
    assert differences(tmp_path / "run") == pytest.approx([5e-4, 5e-4], rel=0.01)
    firing = health(tmp_path / "run").firing
    assert [(rule.rule, rule.since, rule.steps) for rule in firing] == [
        *[("logprob_abs_diff", 1, 2), ("stale_weights", 2, 1)]
    ]
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [text for text in warned if text.startswith("Step ")] == [rule.text for rule in firing]
    assert "Step 1: trainer and rollout engine disagree" in (tmp_path / "run" / "report.html").read_text()


def test_a_run_ends_on_a_rule_that_it_names_and_goes_on_without_it(run: Run, tmp_path: Path) -> None:
    """An untrained model whose every answer is cut off and wrong: all groups have equal rewards."""
    keys = {"run__steps": 12, "train__optimizer_steps": 1, "reward__function": "exact_match"}
    with pytest.raises(HealthError, match=r"^Step 10: 100 % of the generated groups teach nothing") as raised:
        run(**keys, run__stop_on=["no_signal"])
    assert "run.stop_on names no_signal" in str(raised.value)
    assert "--resume goes on from the last checkpoint." in str(raised.value)
    ended = health(tmp_path / "run")
    assert (ended.step, ended.status, ended.stopped_by) == (10, "stopped", "no_signal")
    assert {rule.rule: rule.since for rule in ended.firing} == {"no_signal": 10, "truncation": 10}
    assert "Stopped by the rule no_signal after step 10." in (tmp_path / "run" / "report.html").read_text()
    info = run(**keys, run__resume=True)
    assert info.step == 12
    resumed = health(tmp_path / "run")
    assert (resumed.step, resumed.status, resumed.stopped_by) == (12, "warning", None)
    assert {rule.rule: rule.since for rule in resumed.firing} == {"no_signal": 10, "truncation": 10}
