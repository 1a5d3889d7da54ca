"""Components that a run builds, by its task."""

from __future__ import annotations

from typing import Any

import pytest

from anygauge.config import Config
from anygauge.config.roles import Components, evaluation_components, run_components

REPLAY = {"mode": "train_only", "replay_rollouts": "dumps"}


def config_of(task: str = "rl", *, mode: dict[str, Any] | None = None, scored: bool = True) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "x", "task": task},
            "model": "model",
            "data": {"train": ["t.jsonl"]},
            "reward": {"function": "exact_match"} if scored else {},
            "eval": {"data": ["e.jsonl"]},
            "debug": mode or {},
        }
    )


@pytest.mark.parametrize(
    ("config", "trains", "generates"),
    [
        (config_of(), True, True),
        (config_of(mode={"mode": "rollout_only"}), False, True),
        (config_of(mode=REPLAY), True, False),
        (config_of("sft"), True, True),
        (config_of("sft", scored=False), True, False),
    ],
)
def test_a_run(config: Config, trains: bool, generates: bool) -> None:
    assert run_components(config) == Components(trains=trains, generates=generates, learns=trains)


def test_an_evaluation_trains_nothing_and_loads_what_only_a_train_engine_can() -> None:
    alone = config_of(mode=REPLAY)
    assert evaluation_components(alone, loads=False) == Components(trains=False, generates=True)
    assert evaluation_components(alone, loads=True) == Components(trains=True, generates=True)
    external = alone.rollout.model_copy(update={"external": ("http://127.0.0.1:1",)})
    given = alone.model_copy(update={"rollout": external})
    assert evaluation_components(given, loads=False).trains, (
        "engines of others are sent the weights of the model"
    )
    assert evaluation_components(config_of("sft", scored=False), loads=False) == Components(
        trains=True, generates=False
    )
