"""``anygauge demo``: the inputs of the arithmetic recipe, and a few steps of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from anygauge.cli import demo, main
from anygauge.cli.demo import inputs as script
from anygauge.config import load_config
from anygauge.plugins import load_plugins
from anygauge_tests.datasets import read_rows

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("--batch-size", "32", "--check-interval", "2", "--max-steps", "2", "--stop-score", "0")


@pytest.fixture(scope="module")
def make_inputs() -> Iterator[Callable[..., None]]:
    """Return a function that runs the script as its command line does."""
    threads = torch.get_num_threads()
    yield lambda out, *arguments: script.main(["--out", str(out), *SHORT, *arguments])
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def inputs(make_inputs: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the recipe's inputs, with a policy that has seen two batches."""
    out = tmp_path_factory.mktemp("arithmetic") / "inputs"
    make_inputs(out)
    return out


def operands(prompt: str) -> frozenset[int]:
    left, _, right = prompt.removesuffix("=").partition("+")
    return frozenset((int(left), int(right)))


def test_labels_are_the_reversed_sums(inputs: Path) -> None:
    rows = read_rows(inputs / "train.jsonl") + read_rows(inputs / "eval.jsonl")
    assert {"prompt": "37+58=", "label": "59"} in rows
    for row in rows:
        left, _, right = row["prompt"].removesuffix("=").partition("+")
        assert int(row["label"][::-1]) == int(left) + int(right)


def test_held_out_problems_are_in_no_training_data_in_either_order() -> None:
    split = script.split_problems()
    train, validation, evaluation = (
        {operands(row.prompt) for row in part} for part in (split.train, split.validation, split.evaluation)
    )
    assert len(split.evaluation) == len(evaluation) == 512
    assert len(train) + len(validation) + len(evaluation) == 5050
    assert not train & validation
    assert not (train | validation) & evaluation


def test_inputs_hold_the_split(inputs: Path) -> None:
    split = script.split_problems()
    for name, part in (("train", split.train), ("eval", split.evaluation)):
        assert read_rows(inputs / f"{name}.jsonl") == [{"prompt": p.prompt, "label": p.label} for p in part]


def test_a_second_run_changes_nothing(
    inputs: Path, make_inputs: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    weights = inputs / "model" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    make_inputs(inputs)
    assert "up to date" in capsys.readouterr().out
    assert weights.stat().st_mtime_ns == before


def test_a_seed_repeats_and_another_replaces(
    inputs: Path, make_inputs: Callable[..., None], tmp_path: Path
) -> None:
    weights = tmp_path / "again" / "model" / "model.safetensors"
    expected = (inputs / "model" / "model.safetensors").read_bytes()
    make_inputs(tmp_path / "again")
    assert weights.read_bytes() == expected
    make_inputs(tmp_path / "again", "--seed", "1")
    assert weights.read_bytes() != expected


def test_a_directory_of_somebody_else_is_left_alone(make_inputs: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(SystemExit, match="is not the work of this script"):
        make_inputs(tmp_path)
    assert (tmp_path / "precious").exists()


def test_a_warm_up_that_does_not_get_there_says_so(make_inputs: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"did not reach 0\.9 in 2 steps"):
        make_inputs(tmp_path / "out", "--stop-score", "0.9")
    assert not (tmp_path / "out").exists()


def test_the_recipe_names_what_the_demo_makes() -> None:
    config = load_config(demo.RECIPE, backend="cpu", plugins=load_plugins(), check_files=False).config
    assert demo.RECIPE.read_bytes() == (ROOT / "examples" / "arithmetic_grpo.toml").read_bytes()
    files = [config.model.path, *(file.path for file in (*config.data.train, *config.eval.data))]
    assert {str(Path(name).parent) for name in files} == {demo.INPUTS}


def test_a_demo_without_its_inputs_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / demo.INPUTS).mkdir(parents=True)  # of somebody else
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["demo", "--backend", "cpu"])


def test_a_demo_with_a_wrong_key_makes_no_inputs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--backend", "cpu", "--seed", "-1"]) == 1
    assert "run.seed: found -1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_demo_trains(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(demo, "make_inputs", seeds.append)
    overrides = {
        "model.path": inputs / "model",
        "data.train": f'["{inputs / "train.jsonl"}"]',
        "eval.data": f'["{inputs / "eval.jsonl"}"]',
        "eval.max_prompts": 32,
        "run.directory": tmp_path,
        "run.steps": 2,
        "rollout.prompts_per_step": 16,
        "placement.threads_per_worker": 1,
    }
    arguments = [part for key, value in overrides.items() for part in (f"--{key}", str(value))]
    assert main(["demo", "--backend", "cpu", *arguments]) == 0
    assert seeds == [0]
    rows = read_rows(tmp_path / "arithmetic-grpo" / "metrics.jsonl")
    assert [row["eval/step"] for row in rows if "eval/step" in row] == [0, 2]
    assert all(row["eval/eval-samples"] == 32 for row in rows if "eval/step" in row)
    rollouts = [row for row in rows if "rollout/step" in row]
    assert [row["rollout/step"] for row in rollouts] == [1, 2]
    assert all(row["rollout/samples"] == 16 * 8 for row in rollouts)
    assert all(0 <= row["rollout/raw_reward"] <= 1 for row in rollouts)
    assert (tmp_path / "arithmetic-grpo" / "hf" / "tokenizer.json").is_file()
