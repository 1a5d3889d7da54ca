"""HCCL between two real NPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., str]

pytestmark = [pytest.mark.npu_hw, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parent / "programs" / "collectives.py"


def test_two_ranks_do_what_training_asks_of_hccl(run: Run) -> None:
    report = json.loads(run(str(PROGRAM), timeout_s=500).splitlines()[-1])
    assert report == [{"rank": rank, "backend": "hccl", "failed": []} for rank in range(2)]
