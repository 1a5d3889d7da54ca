"""Five steps of the demo on a real NPU."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., str]

pytestmark = [pytest.mark.npu_hw, pytest.mark.timeout(3600)]

STEPS = 5


def test_five_steps_train_and_start_as_the_host_does(run: Run, tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    run("examples/arithmetic/make_inputs.py", "--seed", "0", "--out", str(inputs))
    metrics = {backend: trained(run, backend, inputs, tmp_path) for backend in ("npu", "cpu")}
    steps = metrics["npu"]
    assert len(steps) == STEPS
    assert all(math.isfinite(step["train/loss"]) and step["train/grad_norm"] > 0 for step in steps)
    assert all(step["rollout/raw_reward"] > 0 for step in steps)
    # the same weights, prompts and seeds; sampling differs where two log-probs are closer than the dtypes
    first = [metrics[backend][0]["rollout/raw_reward"] for backend in ("npu", "cpu")]
    assert first[0] == pytest.approx(first[1], abs=0.05)


def trained(run: Run, backend: str, inputs: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """Run the demo and return the metrics of its training steps."""
    files = {"model.path": "model", "data.train": ["train.jsonl"]}
    run(
        *("-m", "anygauge", "train", "examples/arithmetic_grpo.toml", "--backend", backend),
        *("--model.path", str(inputs / files["model.path"])),
        *("--data.train", json.dumps([str(inputs / "train.jsonl")])),
        *("--eval.data", "[]", "--run.steps", str(STEPS), "--run.directory", str(tmp_path)),
        *("--run.name", backend, "--placement.train_workers", "1", "--save.every", "none"),
    )
    lines = (tmp_path / backend / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "train/loss" in line]
