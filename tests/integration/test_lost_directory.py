"""Runs whose directory goes away, or takes no checkpoint: they end, and say so."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_config
from anygauge.plugins import load_plugins
from anygauge.trainer import start as start_module
from anygauge.trainer.run import train
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import CheckpointError
from anygauge_hooks.types import RunInfo
from anygauge_tests.recipe import tiny_recipe

Harm = Callable[[Path], object]


class Harmful:
    """A plugin that does something to the run directory after a step."""

    def __init__(self, step: int, harm: Harm) -> None:
        self.step, self.harm = step, harm
        self.steps: list[int] = []

    @hookimpl
    def after_train_step(self, run: RunInfo, metrics: Mapping[str, float]) -> None:
        self.steps.append(run.step)
        if run.step == self.step:
            self.harm(Path(run.directory))


@pytest.fixture
def fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch_actors: Any) -> Callable[..., Harmful]:
    """Return a function that trains until the error that a harm causes."""
    monkeypatch.setattr(start_module, "launch_workers", launch_actors)

    def fail(match: str, step: int, harm: Harm) -> Harmful:
        plugins, plugin = load_plugins(), Harmful(step, harm)
        plugins.register(plugin, "harmful")
        config = tiny_recipe(tmp_path, run__steps=3, save__every=1, debug__dump_rollouts=True)
        with pytest.raises(CheckpointError, match=match) as caught:
            train(load_config(config, backend="cpu", plugins=plugins), plugins)
        assert caught.value.hint
        return plugin

    return fail


def move(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


def replace(directory: Path) -> None:
    move(directory)
    directory.mkdir()


@pytest.mark.parametrize("harm", [shutil.rmtree, move, replace])
def test_a_directory_that_goes_away_ends_the_run(
    tmp_path: Path, fail: Callable[..., Harmful], harm: Harm
) -> None:
    plugin = fail(r"run was moved or deleted while the run was writing to it", 2, harm)
    assert plugin.steps == [1, 2]
    assert (tmp_path / "run").exists() == (harm is replace)
    assert list(tmp_path.glob("run/*")) == []


def forbid_checkpoints(directory: Path) -> None:
    shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    (directory / "checkpoints").write_text("")


def test_a_run_without_a_checkpoint_does_not_end_well(tmp_path: Path, fail: Callable[..., Harmful]) -> None:
    plugin = fail(r"of step 3, could not be written: the run has none\. The trained", 1, forbid_checkpoints)
    assert plugin.steps == [1, 2, 3]
    assert (tmp_path / "run" / "hf" / "config.json").is_file()
