"""``make demo-audio``: recordings of tones, a warm-up and a few steps of RL with GLM-Omni."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import wave
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from anygauge.cli import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tones", EXAMPLES / "tones" / "make_inputs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def inputs(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the recipes' inputs, with few rows."""
    out = tmp_path_factory.mktemp("tones") / "inputs"
    script.main(["--out", str(out), "--rows", "64"])
    return out


def heard(recording: bytes, script: ModuleType) -> str:
    """Return the label of a recording, from its spectrum and from how often it is silent."""
    with wave.open(io.BytesIO(recording)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    loud = [np.abs(slot).max() > 0.1 for slot in np.split(samples, script.SLOTS)]
    frequency = np.abs(np.fft.rfft(samples)).argmax() * script.RATE / len(samples)
    (pitch,) = (name for name, (low, high) in script.PITCHES.items() if low - 20 < frequency < high + 20)
    return f"{sum(loud)} {pitch}"


def test_labels_are_those_of_the_recordings_but_where_they_are_swapped(
    inputs: Path, script: ModuleType
) -> None:
    right = {}
    for name in ("warm_up", "train", "held_out", "swapped"):
        rows = pyarrow.parquet.read_table(inputs / f"{name}.parquet").to_pylist()
        right[name] = np.mean([heard(row["audio"][0]["bytes"], script) == row["label"] for row in rows])
    assert right["train"] == right["held_out"] == 1
    assert max(right["warm_up"], right["swapped"]) < 0.3


def test_the_warm_up_takes_the_inputs(inputs: Path, tmp_path: Path) -> None:
    keys = {"model.path": inputs / "model", "data.train": f'["{inputs / "warm_up"}.parquet"]'}
    train("tones_audio_sft.toml", tmp_path, "--dry-run", **keys)


def test_the_recipe_trains(inputs: Path, tmp_path: Path) -> None:
    held_out = f'[{{path = "{inputs / "held_out.parquet"}", name = "held-out"}}]'
    train(
        "tones_audio.toml",
        tmp_path,
        **{"model.path": inputs / "model", "data.train": f'["{inputs / "train"}.parquet"]'},
        **{"eval.data": held_out, "eval.max_prompts": 16, "run.steps": 2, "rollout.prompts_per_step": 8},
    )
    lines = (tmp_path / "tones-audio" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 2
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in steps)
    assert [row["eval/held-out-samples"] for row in rows if "eval/step" in row] == [16, 16]


def train(recipe: str, directory: Path, *flags: str, **overrides: Any) -> None:
    keys = {"run.directory": directory, "placement.threads_per_worker": 1, **overrides}
    arguments = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    assert main(["train", str(EXAMPLES / recipe), "--backend", "cpu", *flags, *arguments]) == 0
