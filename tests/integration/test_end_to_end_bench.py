"""Rows of ``bench/end_to_end.py`` on the CPU, without servers: how a model is divided, and a critic."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.cli.entry import run
from anygauge.testing.tiny import tiny_qwen3

BENCH = Path(__file__).parents[2] / "bench"
ROWS = ("embedded", "colocated-tp2", "colocated-pp2", "colocated-cp2", "experts-ep2", "critic")
FEW = {"rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 4, "run.progress": "false"}
REWARD = "--reward.function=end_to_end_inputs:even_characters"


def write_inputs(directory: Path) -> dict[str, Any]:
    """Write a model and sums, and return the keys that name them."""
    tiny_qwen3(directory / "model", init_std=0.2)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(3) for b in range(4)]
    (directory / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    files = [str(directory / "data.jsonl")]
    sets = {f"eval.datasets.{name}.files": files for name in ("first", "eval")}
    return {"model.path": str(directory / "model"), "data.train": files, **sets}


def test_every_way_to_divide_a_model_runs(
    tmp_path: Path, forked_actors: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCH)
    bench = runpy.run_path(str(BENCH / "end_to_end.py"))
    names, inputs = bench["main"].__globals__, write_inputs(tmp_path / "inputs")
    first = bench["FIRST_TOKEN"]

    def train(command: Sequence[str], *, env: Mapping[str, str], check: bool) -> SimpleNamespace:
        monkeypatch.setenv(first, env[first])
        return SimpleNamespace(returncode=run(command[command.index("train") :]))

    monkeypatch.setitem(names, "subprocess", SimpleNamespace(run=train))
    monkeypatch.setitem(names, "make_inputs", lambda *asked: inputs)
    (tmp_path / "runs").mkdir()
    places = ["--store", str(tmp_path / "rows.jsonl"), "--directory", str(tmp_path / "runs")]
    few = [f"--{key}={value}" for key, value in FEW.items()] + [REWARD]
    with pytest.raises(SystemExit) as ended:
        bench["main"]([*places, "--backend", "cpu", "--embedded", "--rows", *ROWS, "--steps", "2", *few])
    assert not ended.value.code
    rows = {row["row"]: row for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    assert tuple(rows) == ROWS
    assert all(
        row["step_s"] > 0 and row["steps"] == 2 and row["settings"]["extra"] == few for row in rows.values()
    )
    assert all(0 < row["start_s"] < row["run_s"] for row in rows.values())
    stages = ("config", "processes", "checks", "data", "workers", "engines")
    for row in rows.values():
        seconds = [row["start_parts_s"][f"driver {stage}"] for stage in stages]
        assert seconds == sorted(seconds)
    assert max(row["log_prob_difference"] for row in rows.values()) < 1e-5
    assert rows["critic"]["phases_s"]["perf/train_values_time"] > 0
