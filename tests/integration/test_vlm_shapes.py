"""``make demo-vlm``: pictures of shapes, a warm-up and a few steps of RL."""

from __future__ import annotations

import importlib.util
import io
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from anygauge.cli import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"shapes_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load(EXAMPLES / "shapes" / "make_inputs.py")


@pytest.fixture(scope="module")
def inputs(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the recipes' inputs, with few rows."""
    out = tmp_path_factory.mktemp("shapes") / "inputs"
    script.main(["--out", str(out), "--rows", "64"])
    return out


def rows_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return found


def count(picture: np.ndarray[Any, Any]) -> int:
    """Return in how many of the nine cells there is something."""
    side = picture.shape[0] // 3
    cells = [picture[y : y + side, x : x + side] for y in (0, side, 2 * side) for x in (0, side, 2 * side)]
    return sum(bool((cell < 255).any()) for cell in cells)


def test_a_picture_shows_what_its_answer_says(inputs: Path, script: ModuleType) -> None:
    found = rows_of(inputs / "held_out.parquet")
    for row in found:
        picture = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        assert (picture.size, picture.mode) == ((script.SIDE, script.SIDE), "RGB")
        number, kind = row["label"].split()
        assert count(np.asarray(picture)) == int(number)
        assert kind.endswith("s") == (int(number) > 1)
    assert len({row["label"] for row in found}) == 12


def test_kinds_are_told_apart_by_their_pixels(script: ModuleType) -> None:
    shares = {}
    for kind in script.KINDS:
        pictures = [np.asarray(script.draw(random.Random(seed), kind, 4)) for seed in range(8)]
        shares[kind] = np.mean([(picture < 255).any(-1).mean() for picture in pictures])
    assert shares["triangle"] < shares["circle"] < shares["square"]


def test_every_file_has_pictures_of_its_own(inputs: Path, script: ModuleType) -> None:
    files = [rows_of(inputs / f"{name}.parquet") for name in script.FILES]
    pictures = [row["images"][0]["bytes"] for rows in files for row in rows]
    assert len(set(pictures)) == len(pictures) == 64 * len(script.FILES)


def test_swapped_rows_have_other_pictures(inputs: Path) -> None:
    rows, swapped = (rows_of(inputs / f"{name}.parquet") for name in ("held_out", "swapped"))
    assert [row["label"] for row in rows] == [row["label"] for row in swapped]
    pairs = list(zip(rows, swapped, strict=True))
    assert all(row["images"] != other["images"] for row, other in pairs)
    assert sorted(str(row["images"]) for row in rows) == sorted(str(row["images"]) for row in swapped)


def test_an_answer_is_two_tokens_and_an_end(inputs: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    for row in rows_of(inputs / "train.parquet"):
        tokens = tokenizer(row["label"])["input_ids"]
        assert len(tokens) == 2
        assert tokenizer.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=True) == row["label"]


def test_the_first_export_that_is_good_enough_is_chosen(tmp_path: Path) -> None:
    choose = load(EXAMPLES / "shapes" / "choose.py")
    scores = {0: 0.0, 5: 0.2, 10: 0.3, 15: 0.6}
    lines = [{"eval/step": step, "eval/validation": score} for step, score in scores.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    for step in (5, 10, 15):
        (tmp_path / f"hf-step-{step}").mkdir()
    assert choose.choose(tmp_path, 0.25) == (tmp_path / "hf-step-10", 0.3)
    with pytest.raises(SystemExit, match=r"did not reach 0\.9: its best score is 0\.6"):
        choose.choose(tmp_path, 0.9)


def test_the_recipes_train(inputs: Path, tmp_path: Path) -> None:
    run(
        "shapes_vlm_sft.toml",
        tmp_path,
        **files(inputs, "warm_up", "validation"),
        **{"model.path": inputs / "model", "run.steps": 4, "save.hf_every": 4, "eval.interval": 4},
    )
    losses = [row["train/loss"] for row in metrics(tmp_path / "shapes-sft") if "train/loss" in row]
    assert losses[-1] < losses[0]
    chosen = tmp_path / "shapes-sft" / "hf-step-4"
    assert (chosen / "preprocessor_config.json").is_file()

    evaluated = f'[{{path = "{inputs / "held_out.parquet"}", name = "held-out"}}]'
    run(
        "shapes_vlm.toml",
        tmp_path,
        **files(inputs, "train", "held_out") | {"eval.data": evaluated},
        **{"model.path": chosen, "run.steps": 3, "eval.max_prompts": 16, "rollout.prompts_per_step": 8},
    )
    rows = metrics(tmp_path / "shapes-vlm")
    assert [row["eval/held-out-samples"] for row in rows if "eval/step" in row] == [16, 16]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 3
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in steps)
    assert all(row["rollout/samples"] == 64 for row in steps)


def files(inputs: Path, train: str, evaluated: str) -> dict[str, str]:
    return {
        "data.train": f'["{inputs / train}.parquet"]',
        "eval.data": f'["{inputs / evaluated}.parquet"]',
    }


def run(recipe: str, directory: Path, **overrides: Any) -> None:
    keys = {"run.directory": directory, "placement.threads_per_worker": 1, **overrides}
    arguments = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    assert main(["train", str(EXAMPLES / recipe), "--backend", "cpu", *arguments]) == 0


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
