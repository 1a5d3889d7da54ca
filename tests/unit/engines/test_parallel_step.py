"""Calculations of ``bench/parallel_step.py``; the steps themselves need devices."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(BENCH)
    return runpy.run_path(str(BENCH / "parallel_step.py"))


@pytest.mark.parametrize(
    ("communication", "compute", "expected"),
    [
        ([(0, 10)], [], 10),
        ([(0, 10)], [(0, 10)], 0),
        ([(0, 10), (5, 20)], [(8, 12), (30, 40)], 16),
        ([(0, 4), (6, 9)], [(2, 7)], 4),
        ([], [(0, 3)], 0),
    ],
)
def test_what_nothing_else_covers_is_exposed(
    script: dict[str, Any], communication: list[Any], compute: list[Any], expected: int
) -> None:
    assert script["exposed"](communication, compute) == expected


def test_every_device_has_the_work_of_one(script: dict[str, Any]) -> None:
    shares = {name: layout.dp_size for name, layout in script["layouts"](4).items()}
    assert {name: shares[name] for name in ("1", "dp4", "tp4", "cp4", "ep4")} == {
        "1": 1,
        "dp4": 4,
        "tp4": 1,
        "cp4": 1,
        "ep4": 4,
    }


def test_a_row_is_the_mean_of_ranks_and_the_most_memory(script: dict[str, Any]) -> None:
    ranks = [
        {"step": step, "communication": 4.0, "exposed": exposed, "memory": memory}
        for step, exposed, memory in ((90.0, 0.0, 3.0), (110.0, 2.0, 5.0))
    ]
    row = {"layout": "dp2", **script["mean"](ranks)}
    assert script["line"](row, 50.0, 1000) == "| dp2 | 100.0 | 10000 | 0.50 | 4.0 | 1.0 | 25% | 5.0 |"
