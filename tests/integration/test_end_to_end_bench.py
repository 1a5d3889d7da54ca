"""A row of ``bench/end_to_end.py``, on the CPU and with a tiny model."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.cli.entry import run
from anygauge_tests.recipe import tiny_recipe

BENCH = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "end_to_end.py"))
FEW = {"rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 4, "run.progress": "false"}


def test_the_embedded_row_runs_anywhere(
    tmp_path: Path, forked_actors: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = BENCH["main"].__globals__
    inputs = tiny_recipe(tmp_path / "inputs")

    def train(command: Sequence[str], **options: Any) -> SimpleNamespace:
        return SimpleNamespace(returncode=run(command[command.index("train") :]))

    held_out = shutil.copy(inputs.parent / "data.jsonl", inputs.parent / "eval.jsonl")
    made = {
        "model.path": str(inputs.parent / "model"),
        "data.train": [str(inputs.parent / "data.jsonl")],
        "eval.data": [str(held_out)],
    }
    monkeypatch.setitem(names, "subprocess", SimpleNamespace(run=train))
    monkeypatch.setitem(names, "make_inputs", lambda directory, model: made)
    (tmp_path / "runs").mkdir()
    places = ["--store", str(tmp_path / "rows.jsonl"), "--directory", str(tmp_path / "runs")]
    few = [f"--{key}={value}" for key, value in FEW.items()]
    with pytest.raises(SystemExit):
        BENCH["main"]([*places, "--backend", "cpu", "--rows", "embedded", "--steps", "2", *few])
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    assert (row["row"], row["devices"], row["steps"]) == ("embedded", 1, 2)
    assert row["settings"]["extra"] == few
    assert row["step_s"] > 0
    assert row["phases_s"]["perf/train_time"] > 0
    assert row["log_prob_difference"] < 1e-5
