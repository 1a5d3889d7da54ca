"""Whole runs whose model is divided among workers: command line, rollouts, weight sync, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anygauge.cli import main
from anygauge_tests.recipe import tiny_recipe

pytestmark = pytest.mark.parallel

SAME = ("train/pg_loss", "train/entropy_loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff")
LAYOUTS = {
    "tp2": ("--train.parallel.tensor", "2"),
    "pp2": ("--train.parallel.pipeline", "2"),
    "cp2": ("--train.parallel.context", "2"),
}


def run(recipe: Path, name: str, *arguments: str) -> list[dict[str, float]]:
    command = ["train", str(recipe), "--backend", "cpu", "--run.name", name, *arguments]
    assert main(command) == 0
    lines = (recipe.parent / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "train/step" in row]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_recipe(
        tmp_path_factory.mktemp("parallel"),
        run__steps=3,
        run__report=False,
        algorithm__entropy_coef=0.1,  # something to learn whatever the rewards are
        placement__train_workers=2,
        save__every=3,
    )


@pytest.fixture(scope="module")
def expected(recipe: Path) -> list[dict[str, float]]:
    """Metrics of two workers that hold the whole model each."""
    return run(recipe, "dp2")


def test_a_run_goes_on_under_another_layout(recipe: Path) -> None:
    constant = ("--train.lr_schedule", "constant")
    first = run(recipe, "other", *LAYOUTS["tp2"], "--save.every", "2", "--run.steps", "2", *constant)
    directory = recipe.parent / "other"
    before = load_file(directory / "hf" / "model-00001-of-00001.safetensors")
    found = run(recipe, "other", *LAYOUTS["pp2"], "--resume", *constant)
    assert found[:2] == first, "these steps were not taken again"
    wanted = run(recipe, "undisturbed", *LAYOUTS["pp2"], *constant)
    assert [step["train/step"] for step in found] == [step["train/step"] for step in wanted] == [1, 2, 3]
    for step, expected in zip(found, wanted, strict=True):
        assert {name: step[name] for name in SAME} == pytest.approx(
            {name: expected[name] for name in SAME}, rel=1e-4, abs=1e-5
        )
    assert (
        main(["convert", "--to-hf", str(directory / "checkpoints/step-00000002"), str(directory / "2")]) == 0
    )
    after = load_file(directory / "2" / "model-00001-of-00001.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_divided_model_is_the_same_run(recipe: Path, expected: list[dict[str, float]], layout: str) -> None:
    found = run(recipe, layout, *LAYOUTS[layout])
    assert len(found) == len(expected) == 3
    for step, wanted in zip(found, expected, strict=True):
        assert wanted["train/grad_norm"] > 1e-3
        assert {name: step[name] for name in SAME} == pytest.approx(
            {name: wanted[name] for name in SAME}, rel=1e-4, abs=1e-5
        )
        # the engines hold what was trained, in whatever parts
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-4
