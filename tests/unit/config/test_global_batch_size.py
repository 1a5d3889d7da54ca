"""``train.global_batch_size`` is another way to set ``train.optimizer_steps``."""

from __future__ import annotations

from typing import Any

import pytest

from anygauge.config import Config


def config(task: str = "rl", **train: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "sizes", "task": task},
            "model": {"path": "model"},
            "data": {"train": [{"path": "rows.jsonl"}]},
            "rollout": {"prompts_per_step": 32, "samples_per_prompt": 8},
            "train": train,
        }
    )


@pytest.mark.parametrize(
    ("size", "task", "steps"), [(256, "rl", 1), (64, "rl", 4), (8, "sft", 4), (512, "rl", 1)]
)
def test_optimizer_steps_follow_from_the_batch_size(size: int, task: str, steps: int) -> None:
    assert config(task, global_batch_size=size).optimizer_steps == steps


def test_without_it_the_other_key_counts() -> None:
    assert config(optimizer_steps=2).optimizer_steps == 2


@pytest.mark.parametrize(
    ("train", "path", "hint"),
    [
        (
            {"global_batch_size": 100},
            "train.global_batch_size",
            "must divide the 256 samples a step (32 prompts x 8)",
        ),
        (
            {"global_batch_size": 64, "optimizer_steps": 2},
            "train.optimizer_steps",
            "leave one of the two keys out",
        ),
        ({"global_batch_size": 64}, None, ""),
        ({"global_batch_size": 64, "optimizer_steps": 4}, None, ""),
    ],
)
def test_a_size_that_does_not_fit(train: dict[str, Any], path: str | None, hint: str) -> None:
    from anygauge.config.check import _optimizer_steps

    problems = list(_optimizer_steps(config(**train), frozenset()))
    assert [problem.path for problem in problems] == ([] if path is None else [path])
    assert all(hint in problem.hint for problem in problems)
