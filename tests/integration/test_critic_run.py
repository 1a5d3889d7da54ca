"""A run whose first steps train the critic alone: what it leaves out, its schedule, a resume across it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_config
from anygauge.plugins import load_plugins
from anygauge.trainer.run import train
from anygauge_hooks import hookimpl
from anygauge_hooks.types import RunInfo
from anygauge_tests.observer import Tracking
from anygauge_tests.recipe import tiny_recipe

STEPS, ALONE, LR = 4, 2, 1e-3
Train = Callable[..., "Observer"]


class Observer(Tracking):
    """Keeps the metrics of training by step and the versions of weights."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}
        self.versions: list[int] = []

    @hookimpl
    def after_weight_sync(self, run: RunInfo, version: int) -> None:
        self.versions.append(version)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        trained = {name: value for name, value in metrics.items() if name.startswith(("train/", "health/"))}
        self.metrics.setdefault(step, {}).update(trained)


@pytest.fixture
def run(tmp_path: Path, forked_actors: None) -> Train:
    config = tiny_recipe(
        tmp_path,
        run__steps=STEPS,
        run__trackers=["memory"],
        run__report=False,
        reward__function="even",
        algorithm__advantage="gae",
        critic__lr=1e-2,
        critic__warmup_steps=ALONE,
        train__lr=LR,
        train__lr_schedule="cosine",
        save__every=1,
        save__keep=STEPS,
        save__hf_at_end=False,
    )

    def start(name: str, **keys: Any) -> Observer:
        plugins, observer = load_plugins(), Observer()
        plugins.register(observer, "observer")
        given = [("run.name", name), *((key.replace("__", "."), value) for key, value in keys.items())]
        train(load_config(config, given, backend="cpu", plugins=plugins), plugins)
        return observer

    return start


def test_the_critic_alone_then_both(run: Train, tmp_path: Path) -> None:
    whole = run("whole")
    policy = {step: "train/grad_norm" in row for step, row in whole.metrics.items()}
    assert policy == {1: False, 2: False, 3: True, 4: True}
    assert policy == {step: "health/logprob_abs_diff" in row for step, row in whole.metrics.items()}
    assert all(row["train/critic_grad_norm"] > 0 for row in whole.metrics.values())
    assert whole.versions == [1, 2], "weights that are the same are not sent"
    # The schedule is that of the steps in which the policy is trained.
    for number, step in enumerate((3, 4), start=1):
        rate = LR * (1 + math.cos(math.pi * number / (STEPS - ALONE + 1))) / 2
        assert whole.metrics[step]["train/lr"] == pytest.approx(rate)

    for stopped in (1, 2, 3):
        copy = tmp_path / f"from-{stopped}"
        shutil.copytree(tmp_path / "whole", copy)
        for step in range(stopped + 1, STEPS + 1):
            shutil.rmtree(copy / f"checkpoints/step-{step:08d}")
        resumed = run(copy.name, run__resume=True)
        assert resumed.metrics == {step: whole.metrics[step] for step in range(stopped + 1, STEPS + 1)}
