"""A whole run with a real server: its log-probs are the trainer's, version after version."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from anygauge_hooks.rl import Group
from anygauge_tests.observer import Observer, run_with_observer
from anygauge_tests.recipe import tiny_recipe

BENCH = Path(__file__).parents[2] / "bench" / "end_to_end.py"
ROWS = ("apart-sync", "colocated-tp2")
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


TASK = {
    "data": {"label_key": "label"},
    "reward": {"function": "end_to_end_inputs:even_characters"},
    "rollout": {
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_new_tokens": 4,
        "max_batch_tokens": 8192,
        "sglang": {"context_length": 256},
    },
    "train": {"dtype": "float32", "lr": 1e-2},
    "placement": {"start_timeout_s": 600},
    "weight_sync": {"verify": "always"},
    "run": {"report": False},
}


def test_servers_and_trainers_agree_in_every_step_apart_and_colocated(tmp_path: Path) -> None:
    """Rows of ``bench/end_to_end.py``: the second divides the model in the trainers and in the server."""
    inputs = tiny_recipe(tmp_path).parent
    files = [str(inputs / "data.jsonl")]
    sets = {name: {"files": files, "max_prompts": 1} for name in ("first", "eval")}
    task = {**TASK, "data": {**TASK["data"], "train": files}, "eval": {"datasets": sets}}
    (tmp_path / "task.toml").write_text(tomli_w.dumps(task), encoding="utf-8")
    places = ["--store", str(tmp_path / "rows.jsonl"), "--directory", str(tmp_path / "runs")]
    given = ["--backend", "cpu", "--model", str(inputs / "model"), "--task", str(tmp_path / "task.toml")]
    command = [sys.executable, str(BENCH), *given, "--rows", *ROWS, "--steps", "3", *places]
    assert subprocess.run(command, check=False).returncode == 0
    rows = list(map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines()))
    assert [row["row"] for row in rows] == [*ROWS]
    assert max(row["log_prob_difference"] for row in rows) < 1e-4
    for row in ROWS:
        lines = (tmp_path / "runs" / f"end-to-end-{row}" / "metrics.jsonl").read_text().splitlines()
        steps = [metrics for metrics in map(json.loads, lines) if "perf/step_time" in metrics]
        assert [metrics["rollout/lag/max"] for metrics in steps] == [0, 0, 0]
        assert steps[0]["train/grad_norm"] > 0  # so that the weights of the next steps are others


def test_samples_of_an_asynchronous_run_tell_the_weights_of_each_token(tmp_path: Path) -> None:
    keys = {"rollout__schedule": "async", "algorithm__correction__tis": {}}
    observer = run(tmp_path, run__steps=6, rollout__max_new_tokens=64, **keys)
    assert versions(observer.groups)[0] == 0
    assert versions(observer.groups)[-1] in (4, 5)  # the last step trains version 5
    assert max(metrics["rollout/lag/max"] for metrics in observer.metrics) == 1
