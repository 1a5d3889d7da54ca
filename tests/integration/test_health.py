"""Runs whose rollout engine computes other log-probs than the trainer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_config
from anygauge.observability.health import HEALTH_FILE, read_events
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


def test_engines_that_agree(run: Run, tmp_path: Path) -> None:
    run()
    found = differences(tmp_path / "run")
    assert len(found) == 2
    assert max(found) < 1e-5
    assert not (tmp_path / "run" / HEALTH_FILE).exists()


def test_an_engine_with_another_model_stops_the_run_before_anything_is_learnt(
    run: Run, tmp_path: Path
) -> None:
    """An engine that computes in bfloat16 is far from a trainer in float32, by the limit of float32."""
    with pytest.raises(HealthError, match=r"^Step 1: .*logprob_abs_diff_error = 0\.001"):
        run(rollout__dtype="bfloat16", health__logprob_abs_diff_error=1e-3)
    directory = tmp_path / "run"
    (found,) = differences(directory)
    assert 1e-3 < found < 0.1
    assert not list((directory / "checkpoints").glob("step-*"))
    report = (directory / "report.html").read_text()
    assert report.count("Step 1: trainer and rollout engine disagree") == 2  # what ended it, and its health
    assert json.loads((directory / "run.json").read_text())["parts"][-1]["outcome"] == "failed"


def test_a_run_that_is_stopped_later_keeps_what_it_learnt(run: Run, tmp_path: Path) -> None:
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
    events, _ = read_events(tmp_path / "run")
    assert [(event.step, event.level) for event in events] == [(1, "warning"), (2, "warning")]
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [text for text in warned if "disagree" in text] == [events[0].text]
    assert "Step 1: trainer and rollout engine disagree" in (tmp_path / "run" / "report.html").read_text()
