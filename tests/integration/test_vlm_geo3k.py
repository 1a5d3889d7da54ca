"""The geometry recipes on problems with their diagrams, with a tiny model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anygauge.cli import main
from anygauge_tests.datasets import read_rows, write_geo3k

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "geo3k_vlm_multi_turn"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("geo3k_make_inputs", EXAMPLE / "make_inputs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def inputs(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = write_geo3k(tmp_path_factory.mktemp("geo3k"))
    script.main(["--data", str(data), "--out", str(data / "inputs"), "--tiny"])
    return data / "inputs"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)


def test_questions_have_their_choices_and_name_their_diagrams(
    script: ModuleType, geo3k: Path, tmp_path: Path
) -> None:
    script.main(["--data", str(geo3k), "--out", str(tmp_path)])
    rows = read_rows(tmp_path / "train.jsonl")
    assert len(rows) == 10
    for row in rows:
        assert row["prompt"].startswith("<image>")
        assert all(choice in row["prompt"] for choice in row["choices"])
        assert row["label"] in "ABCD"
        assert [Path(path).parent for path in row["images"]] == [geo3k.resolve()]


def train(recipe: str, inputs: Path, directory: Path, **overrides: Any) -> list[dict[str, Any]]:
    """Run a recipe and return its metrics."""
    keys = {
        "model.path": inputs / "model",
        "data.train": f'["{inputs / "train.jsonl"}"]',
        "eval.data": f'["{inputs / "train.jsonl"}"]',
        "eval.max_prompts": 2,
        "run.directory": directory,
        "run.steps": 2,
        "rollout.prompts_per_step": 4,
        "rollout.max_new_tokens": 48,
        "placement.threads_per_worker": 1,
        **overrides,
    }
    arguments = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    assert main(["train", str(EXAMPLE / f"{recipe}.toml"), "--backend", "cpu", *arguments]) == 0
    return read_rows(directory / f"geo3k-{recipe}" / "metrics.jsonl")


def test_grpo_trains_and_a_replay_trains_the_same(inputs: Path, tmp_path: Path) -> None:
    # A random policy earns nothing: what it learns here is to be uncertain.
    learning = {"rollout.samples_per_prompt": 2, "algorithm.entropy_coef": 0.1}
    dumping = {"debug.dump_rollouts": "true", "debug.dump_batches": "true"}
    rows = train("grpo", inputs, tmp_path / "first", **learning, **dumping)
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 2
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in steps)
    assert [row["eval/train-samples"] for row in rows if "eval/step" in row] == [2, 2]
    dumps = tmp_path / "first" / "geo3k-grpo" / "dumps"
    assert 1 <= len(list((dumps / "media").iterdir())) <= 8  # the groups of a step show 4 diagrams
    losses = losses_of(rows)
    assert losses[0] != losses[1]
    for kind in ("rollouts", "batches"):
        replaying = {"debug.mode": "train_only", f"debug.replay_{kind}": dumps, "eval.data": "[]"}
        assert losses_of(train("grpo", inputs, tmp_path / kind, **learning, **replaying)) == losses


@pytest.mark.parametrize("backend", ["cuda", "npu"])
@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_recipes_are_checked_for_devices_that_are_not_there(inputs: Path, recipe: str, backend: str) -> None:
    keys = {"model.path": inputs / "model", "data.train": f'["{inputs / "train.jsonl"}"]'}
    arguments = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    recipe_path = str(EXAMPLE / f"{recipe}.toml")
    assert main(["train", recipe_path, "--backend", backend, "--dry-run", *arguments]) == 0


def losses_of(rows: list[dict[str, Any]]) -> list[float]:
    return [row["train/loss"] for row in rows if "train/loss" in row]


def test_ppo_trains_a_critic_that_sees(inputs: Path, tmp_path: Path) -> None:
    rows = train("ppo", inputs, tmp_path)
    steps = [row for row in rows if "train/value_loss" in row]
    assert len(steps) == 2
