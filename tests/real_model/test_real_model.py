"""SmolLM2-135M-Instruct, a pretrained model, is checked and trained: ``make test-real-model``."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from anygauge.cli import main
from anygauge_hooks import hookimpl
from anygauge_hooks.types import NamedFunction
from anygauge_tests.observer import Observer, run_with_observer

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]

STEPS = 3
SUMS = [(a, b) for a in (12, 30, 47, 58) for b in (5, 21, 33)]


@pytest.fixture(scope="module")
def model() -> Path:
    """Return the directory that the target has made."""
    return Path(os.environ["REAL_MODEL"])


@pytest.fixture(autouse=True)
def seconds(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    with capsys.disabled():
        sys.stdout.write(f"\n{request.node.name}: {time.perf_counter() - start:.0f} s\n")


def test_the_checks_of_a_model_pass(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["check-model", str(model), "--backend", "cpu"])
    out = capsys.readouterr().out
    with capsys.disabled():
        sys.stdout.write(f"\n{out}")
    assert status == 0
    assert "LlamaForCausalLM, family llama" in out


def nearness(response: str, label: str) -> float:
    """Return how near the last number of a response is to the right one; a small bonus for each letter."""
    numbers = [int(word) for word in "".join(c if c.isdigit() else " " for c in response).split()]
    right = int(label)
    near = max(0.0, 1 - abs(numbers[-1] - right) / right) if numbers else 0.0
    return near + 0.001 * len(response)


class Rewarding(Observer):
    """An observer with a reward that differs among samples, so that each step changes the weights."""

    @hookimpl
    def register_reward_functions(self) -> list[NamedFunction]:
        return [NamedFunction(name="nearness", fn=nearness, inline=True)]


@pytest.fixture
def train(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return a function that trains by GRPO and returns the metrics of each step."""

    def run(**keys: Any) -> list[dict[str, float]]:
        rows = [
            {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "label": str(a + b)}
            for a, b in SUMS
        ]
        data = tmp_path / "sums.jsonl"
        data.write_text("\n".join(map(json.dumps, rows)))
        path = tmp_path / "run.toml"
        path.write_text(f'model.path = "{model}"\ndata.train = ["{data}"]\nreward.function = "nearness"\n')
        settings = {
            **{"run.name": "run", "run.directory": tmp_path, "run.steps": STEPS, "run.seed": 1},
            **{"data.cache": tmp_path / "cache", "data.apply_chat_template": True},
            **{"rollout.prompts_per_step": 2, "rollout.samples_per_prompt": 4, "rollout.max_new_tokens": 8},
            **{"train.dtype": "float32", "placement.launcher": "local", "save.every": STEPS},
            **keys,
        }
        observer = Rewarding()
        run_with_observer(path, observer, settings)
        with capsys.disabled():
            for step in observer.metrics:
                shown = ", ".join(f"{name} {step[name]:.3g}" for name in SHOWN)
                sys.stdout.write(f"{shown}\n")
        return list(observer.metrics)

    return run


SHOWN = (
    *("rollout/raw_reward", "train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff"),
    *("perf/step_time", "perf/rollout_time"),
)


def check(steps: list[dict[str, float]]) -> None:
    assert len(steps) == STEPS
    for step in steps:
        assert math.isfinite(step["train/loss"])
        assert step["train/grad_norm"] > 0
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-4


def test_grpo_trains_it(train: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    check(train(**{"train.lr": 1e-6}))
    (export,) = (tmp_path / "run").rglob("model-00001-of-*.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"
    with safe_open(export, "pt") as after, safe_open(model / "model.safetensors", "pt") as before:
        assert not after.get_tensor(name).equal(before.get_tensor(name))


def test_lora_trains_its_adapters(train: Callable[..., Any], tmp_path: Path) -> None:
    check(train(**{"train.lora.rank": 8, "train.lr": 1e-4}))
    (adapter,) = (tmp_path / "run").rglob("adapter_model.safetensors")
    rises = [tensor.abs().max() > 0 for name, tensor in load_file(adapter).items() if "lora_B" in name]
    assert len(rises) == 30 * 7
    assert all(rises)
