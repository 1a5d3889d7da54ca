"""Calculations of ``bench/end_to_end.py``; the runs themselves take minutes."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCH = runpy.run_path(str(Path(__file__).parents[3] / "bench" / "end_to_end.py"))
Call = Callable[..., list[str]]


def metrics(step: int, reward: float) -> dict[str, float]:
    times = {"perf/step_time": 1.0 + step, "perf/train_time": 0.5}
    return {**times, "rollout/reward": reward, "eval/eval": reward, BENCH["DIFFERENCE"]: 1e-6}


@pytest.mark.parametrize("steps", [2, 4, 7, 30])
def test_a_reward_that_rises_is_seen_in_short_runs_too(steps: int) -> None:
    rising = BENCH["measured"]([metrics(step, step / steps) for step in range(steps)])
    falling = BENCH["measured"]([metrics(step, 1 - step / steps) for step in range(steps)])
    assert (BENCH["rises"](rising), BENCH["rises"](falling)) == (True, False)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Return a function that calls the script and returns which rows it ran; the runs are made up."""
    ran: list[str] = []

    def train(command: Sequence[str], **options: Any) -> SimpleNamespace:
        config = Path(command[command.index("train") + 1])
        ran.append(config.stem)
        directory = config.parent / f"end-to-end-{config.stem}"
        directory.mkdir(exist_ok=True)
        lines = [json.dumps(metrics(step, step / 4)) for step in range(4)]
        (directory / "metrics.jsonl").write_text("\n".join(lines))
        return SimpleNamespace(returncode=0)

    names = BENCH["main"].__globals__
    monkeypatch.setitem(names, "subprocess", SimpleNamespace(run=train))

    def made_up(directory: Path, model: Path | None) -> dict[str, Any]:
        directory.mkdir(parents=True, exist_ok=True)
        return {"model.path": str(directory / "model")}

    monkeypatch.setitem(names, "make_inputs", made_up)

    def call(*given: str, rows: Sequence[str] = ("embedded", "colocated")) -> list[str]:
        ran.clear()
        places = ("--store", str(tmp_path / "rows.jsonl"), "--directory", str(tmp_path / "runs"))
        with pytest.raises(SystemExit) as ended:
            BENCH["main"]([*places, "--backend", "cpu", "--rows", *rows, *given])
        assert not ended.value.code
        return [*ran]

    return call


def stored(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def test_a_row_that_is_stored_is_not_run_again(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(rows=["embedded"]) == ["embedded"]
    assert call() == ["colocated"]
    assert call() == []
    assert call("--directory", str(tmp_path / "elsewhere")) == []
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == [
        "embedded",
        "colocated",
    ]
    assert len(stored(tmp_path)) == 2


@pytest.mark.parametrize(
    "change",
    [
        ["--steps", "4"],
        ["--model", "another"],
        ["--backend", "cuda"],
        ["--train.lr=1e-3"],
        ["--label", "another"],
    ],
    ids=lambda change: change[0],
)
def test_a_row_of_other_settings_is_run_again(call: Call, tmp_path: Path, change: list[str]) -> None:
    assert call(rows=["embedded"]) == ["embedded"]
    assert call(*change, rows=["embedded"]) == ["embedded"]
    assert call(*change, rows=["embedded"]) == []
    assert len(stored(tmp_path)) == 2


def test_a_line_that_breaks_off_is_run_again(call: Call, tmp_path: Path) -> None:
    call()
    store = tmp_path / "rows.jsonl"
    content = store.read_bytes()
    store.write_bytes(content[:-10])
    assert call() == ["colocated"]
    assert stored(tmp_path)[0] == json.loads(content.splitlines()[0])
    assert [row["row"] for row in stored(tmp_path)] == ["embedded", "colocated"]
