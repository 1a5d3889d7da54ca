"""A whole run on both launchers: what observers see, what is written, and how it ends."""

from __future__ import annotations

import functools
import gzip
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from anygauge.config.load import LoadedConfig, load_config
from anygauge.plugins import Plugins, load_plugins
from anygauge.run_directory.directory import reserve_run_directory
from anygauge.trainer.run import train
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import CheckpointError, RewardError
from anygauge_hooks.rl import Group
from anygauge_hooks.types import NamedFunction, RunInfo, TrackerSpec
from anygauge_tests.recipe import tiny_recipe

STEPS = 3


class Recorder:
    """A plugin that observes everything, and brings a reward, an estimator and a tracker."""

    def __init__(self, *, failing: bool = False) -> None:
        self.events: list[tuple[str, int]] = []
        self.groups: list[Group] = []
        self.metrics: list[Mapping[str, float]] = []
        self.tracked: list[tuple[int, Mapping[str, float]]] = []
        self.error: BaseException | None = None
        self.failing = failing

    def when_built(self) -> None:
        self.events.append(("when_built", 0))

    @hookimpl
    def before_train(self, run: RunInfo) -> None:
        self.events.append(("before_train", run.step))

    @hookimpl
    def before_train_step(self, run: RunInfo) -> None:
        self.events.append(("before_train_step", run.step))

    @hookimpl
    def after_rollout(self, run: RunInfo, groups: Sequence[Group]) -> None:
        self.events.append(("after_rollout", run.step))
        self.groups.extend(groups)

    @hookimpl
    def after_weight_sync(self, run: RunInfo, version: int) -> None:
        self.events.append(("after_weight_sync", version))

    @hookimpl
    def after_train_step(self, run: RunInfo, metrics: Mapping[str, float]) -> None:
        self.events.append(("after_train_step", run.step))
        self.metrics.append(metrics)

    @hookimpl
    def after_evaluate(self, run: RunInfo, metrics: Mapping[str, float]) -> None:
        self.events.append(("after_evaluate", run.step))

    @hookimpl
    def on_error(self, run: RunInfo, error: BaseException) -> None:
        self.error = error
        self.events.append(("on_error", run.step))

    @hookimpl
    def after_train(self, run: RunInfo) -> None:
        self.events.append(("after_train", run.step))

    @hookimpl
    def register_reward_functions(self) -> list[NamedFunction]:
        return [NamedFunction(name="digits", fn=self.digits, inline=True)]

    def digits(self, response: str) -> float:
        if self.failing:
            raise ZeroDivisionError("a reward that fails")
        return sum(character.isdigit() for character in response) / 4

    @hookimpl
    def register_metric_functions(self) -> list[NamedFunction]:
        return [NamedFunction(name="steps", fn=lambda step, groups: {"step_and_groups": step + len(groups)})]

    @hookimpl
    def register_trackers(self) -> list[TrackerSpec]:
        return [TrackerSpec(name="memory", make=lambda run: self)]

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.tracked.append((step, metrics))

    def close(self) -> None:
        self.events.append(("closed", len(self.tracked)))


Finished = tuple[Path, RunInfo, Recorder]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    return make_inputs(tmp_path)


def make_inputs(directory: Path) -> Path:
    """Write a recipe with everything on, and return its directory."""
    return tiny_recipe(
        directory,
        run__steps=STEPS,
        run__trackers=["jsonl", "memory"],
        run__metrics=["steps"],
        profile__steps=[2],
        profile__ranks=[1],
        reward__function="digits",
        algorithm__kl_coef=0.01,
        train__optimizer_steps=2,
        eval__data=[directory / "data.jsonl"],
        eval__interval=2,
        placement__train_workers=2,
    ).parent


def load(inputs: Path, plugins: Plugins, launcher: str, **overrides: Any) -> LoadedConfig:
    given = [("placement.launcher", launcher), *overrides.items()]
    return load_config(inputs / "run.toml", given, backend="cpu", plugins=plugins)


def with_recorder(*, failing: bool = False) -> tuple[Plugins, Recorder]:
    plugins, recorder = load_plugins(), Recorder(failing=failing)
    plugins.register(recorder, "recorder")
    return plugins, recorder


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str], Finished]:
    """Return a function that runs the recipe on a launcher, once for all tests."""

    @functools.cache
    def run(launcher: str) -> Finished:
        if launcher == "ray":
            request.getfixturevalue("ray_cluster")
        directory = make_inputs(tmp_path_factory.mktemp(launcher))
        plugins, recorder = with_recorder()
        loaded = load(directory, plugins, launcher)
        return directory, train(loaded, plugins, when_built=recorder.when_built), recorder

    return run


@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_a_run_from_start_to_end(launcher: str, finished: Callable[[str], Finished]) -> None:
    directory, info, recorder = finished(launcher)
    assert info.step == STEPS
    assert recorder.events == [
        ("when_built", 0),
        ("before_train", 0),
        ("after_evaluate", 0),
        *step_events(1),
        *step_events(2),
        ("after_evaluate", 2),
        *step_events(3),
        ("after_evaluate", 3),
        ("after_train", 3),
        ("closed", 6),
    ]
    check_groups(recorder.groups)
    check_metrics(recorder.metrics)
    check_directory(directory / "run")


def step_events(step: int) -> list[tuple[str, int]]:
    begun = [("before_train_step", step - 1), ("after_rollout", step - 1)]
    return [*begun, ("after_weight_sync", step), ("after_train_step", step)]


def test_launchers_give_the_same_losses(finished: Callable[[str], Finished]) -> None:
    local, ray = ([row["train/loss"] for row in finished(name)[2].metrics] for name in ("local", "ray"))
    assert local == ray


def check_groups(groups: Sequence[Group]) -> None:
    assert len(groups) == 4 * STEPS
    for step in range(STEPS):
        for group in groups[4 * step : 4 * step + 4]:
            assert len(group.samples) == 4
            for sample in group.samples:
                assert sample.reward is not None
                assert sample.prompt_tokens == group.prompt.tokens
                assert set(sample.weight_versions) == {step}
                assert len(sample.log_probs) == len(sample.response_tokens) == len(sample.loss_mask)
    seeds = [sample.seed for group in groups for sample in group.samples]
    assert len(set(seeds)) == len(seeds)


def check_metrics(metrics: Sequence[Mapping[str, float]]) -> None:
    for row in metrics:
        assert all(math.isfinite(value) for value in row.values())
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert row["perf/step_time"] > row["perf/overhead_time"] > 0
        phases = {"rollout", "reward", "log_probs", "train", "update_weights"}
        assert {f"perf/{phase}_time" for phase in phases} <= row.keys()
    assert metrics[-1]["train/kl_loss"] > 0
    assert [row["custom/step_and_groups"] for row in metrics] == [5, 6, 7]


def check_directory(directory: Path) -> None:
    assert {path.name for path in directory.iterdir()} == {
        *(".lock", "config.toml", "environment.json", "capabilities.json", "run.json", "report.html"),
        *("metrics.jsonl", "samples.jsonl", "distributions.jsonl", "health.json"),
        *("logs", "checkpoints", "hf", "timeline.json", "profiles"),
    }
    logs = sorted(path.name for path in (directory / "logs").iterdir())
    assert logs == ["actor-0.log", "actor-1.log", "driver.log"]
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step-00000003"]
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["eval/step"] for row in rows if "eval/step" in row] == [0, 2, 3]
    assert [row["train/step"] for row in rows if "train/step" in row] == [1, 2, 3]
    check_profile(directory)
    AutoModelForCausalLM.from_pretrained(directory / "hf")
    AutoTokenizer.from_pretrained(directory / "hf")


def check_profile(directory: Path) -> None:
    """Check that a step was profiled, and that the timeline has each process and what it did."""
    (trace,) = (directory / "profiles").rglob("*.*")
    assert trace.relative_to(directory) == Path("profiles/step-00000002/actor-1.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    phases = {"generate", "log_probs", "forward_backward", "optimizer", "weight_sync"}
    assert phases < {event["name"] for event in events if event.get("cat") == "user_annotation"}
    counts = Counter(
        (event["pid"], event["tid"], event["name"])
        for event in json.loads((directory / "timeline.json").read_text())
        if event["ph"] == "X"
    )
    steps = {f"step {step}": 1 for step in range(1, STEPS + 1)}
    driver = {
        **steps,
        "start": 1,
        "generate": 3,
        "train": 3,
        "sync": 3,
        "evaluate": 3,
        "save": 4,
        "profile": 2,
    }
    assert {name: count for (pid, _, name), count in counts.items() if pid == 1} == driver
    for rank in range(2):
        assert counts[2, rank, "optimizer"] == counts[2, rank, "forward_backward"] == 2 * STEPS
        assert counts[2, rank, "weight_sync"] == STEPS
        assert counts[2, rank, "load"] == 1
    assert 'id="timeline"' in (directory / "report.html").read_text()


@pytest.mark.usefixtures("forked_actors")
def test_an_error_ends_the_run_in_order(inputs: Path) -> None:
    plugins, recorder = with_recorder(failing=True)
    keys: Any = {"placement.train_workers": 1, "eval.data": [], "profile.ranks": []}
    with pytest.raises(RewardError, match="a reward that fails"):
        train(load(inputs, plugins, "local", **keys), plugins)
    assert isinstance(recorder.error, RewardError)
    assert recorder.events == [
        *[("before_train", 0), ("before_train_step", 0), ("on_error", 0), ("after_train", 0), ("closed", 0)]
    ]
    assert not (inputs / "run" / "hf").exists()


def test_a_directory_that_cannot_be_made_is_named(inputs: Path) -> None:
    plugins, _ = with_recorder()
    (inputs / "file").write_text("")
    config = load(inputs, plugins, "local").config
    config = config.model_copy(update={"run": config.run.model_copy(update={"directory": inputs / "file"})})
    with (
        pytest.raises(CheckpointError, match=r"cannot be made: .*Not a directory"),
        reserve_run_directory(config),
    ):
        raise AssertionError("it was made")


def test_an_earlier_run_is_not_overwritten(inputs: Path) -> None:
    plugins, _ = with_recorder()
    (inputs / "run").mkdir()
    (inputs / "run" / "metrics.jsonl").write_text("precious")
    with pytest.raises(CheckpointError, match="is not empty"):
        train(load(inputs, plugins, "local"), plugins)
    with pytest.raises(CheckpointError, match="was not created by a run"):
        train(load(inputs, plugins, "local", **{"run.overwrite": True}), plugins)
    assert (inputs / "run" / "metrics.jsonl").read_text() == "precious"
