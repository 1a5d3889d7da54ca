"""Two steps of Megatron's DistributedOptimizer on a simulated NPU: plumbing, never an Ascend's numerics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

pytestmark = pytest.mark.npu_sim

Run = Callable[..., CompletedProcess[str]]
PROGRAM = str(Path(__file__).parent / "programs" / "two_steps.py")


def reported(done: CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_two_optimizer_steps_equal_the_hosts(simulated: Run, on_host: Run) -> None:
    npu = reported(simulated(PROGRAM, "npu"))
    host = reported(on_host(PROGRAM, "cpu"))
    assert (host["devices"], host["dist_backend"]) == (["cpu"], "gloo")
    assert (npu["devices"], npu["dist_backend"]) == (["npu:0"], "hccl")
    assert 0 < npu["memory"]["allocated"] <= npu["memory"]["reserved"]
    for key in ("losses", "norms", "weights"):
        assert npu[key] == host[key], key
    assert npu["losses"][1] < npu["losses"][0]
