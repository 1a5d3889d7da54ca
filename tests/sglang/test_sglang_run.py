"""A whole run with a real server: its log-probs are the trainer's, version after version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from anygauge_hooks.rl import Group
from anygauge_tests.observer import Observer, run_with_observer
from anygauge_tests.recipe import tiny_recipe

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]


def run(directory: Path, **keys: Any) -> Observer:
    path = tiny_recipe(
        directory,
        **{
            "run__steps": 3,
            "rollout__engine": "sglang",
            "rollout__max_batch_tokens": 8192,
            "rollout__sglang.context_length": 256,
            "placement__rollout_workers": 1,
            "placement__start_timeout_s": 600,
            "train__dtype": "float32",
            "train__lr": 1e-2,
            **keys,
        },
    )
    observer = Observer()
    run_with_observer(path, observer)
    return observer


def versions(groups: Sequence[Group]) -> list[int]:
    samples = [sample for group in groups for sample in group.samples]
    return sorted({version for sample in samples for version in sample.weight_versions})


def test_a_server_and_the_trainer_agree_in_every_step(tmp_path: Path) -> None:
    observer = run(tmp_path, weight_sync__verify="always")
    assert versions(observer.groups) == [0, 1, 2]
    differences = [metrics["train/train_rollout_logprob_abs_diff"] for metrics in observer.metrics]
    assert max(differences) < 1e-4
    moved = [metrics["train/ppo_kl"] for metrics in observer.metrics]
    assert all(abs(each) < 1e-4 for each in moved)  # each step was sampled from the weights that it trains


def test_samples_of_an_asynchronous_run_tell_the_weights_of_each_token(tmp_path: Path) -> None:
    keys = {"rollout__schedule": "async", "algorithm__correction__tis": {}}
    observer = run(tmp_path, run__steps=6, rollout__max_new_tokens=64, **keys)
    assert versions(observer.groups)[0] == 0
    assert versions(observer.groups)[-1] in (4, 5)  # the last step trains version 5
    assert max(metrics["rollout/lag/max"] for metrics in observer.metrics) == 1
