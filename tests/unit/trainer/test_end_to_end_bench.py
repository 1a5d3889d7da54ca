"""What ``bench/end_to_end.py`` makes of the metrics of a run; the runs themselves take minutes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCH = runpy.run_path(str(Path(__file__).parents[3] / "bench" / "end_to_end.py"))


def metrics(step: int, reward: float) -> dict[str, float]:
    times = {"perf/step_time": 1.0 + step, "perf/train_time": 0.5}
    return {**times, "rollout/reward": reward, "eval/eval": reward, BENCH["DIFFERENCE"]: 1e-6}


@pytest.mark.parametrize("steps", [2, 4, 7, 30])
def test_a_reward_that_rises_is_seen_in_short_runs_too(steps: int) -> None:
    rising = BENCH["measured"]([metrics(step, step / steps) for step in range(steps)])
    falling = BENCH["measured"]([metrics(step, 1 - step / steps) for step in range(steps)])
    assert (BENCH["rises"](rising), BENCH["rises"](falling)) == (True, False)


def test_rows_of_a_label_are_read_from_the_store(tmp_path: Path) -> None:
    store = tmp_path / "rows.jsonl"
    assert BENCH["read_store"](store, "here") == {}
    store.write_text('{"label": "here", "row": "embedded"}\n{"label": "there", "row": "colocated"}\n')
    assert BENCH["read_store"](store, "here") == {"embedded": {"label": "here", "row": "embedded"}}
