"""The NPU backend with the real torch-npu wheel on a simulated device: plumbing, never an Ascend's numerics.

Runs in an environment of its own: ``make test-npu-sim``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SIMULATION = ROOT / "backends" / "npu" / "simulation"
SOURCES = ("core", "hooks", "backends/cpu", "backends/npu")

pytestmark = [
    pytest.mark.npu_sim,
    pytest.mark.skipif(
        importlib.util.find_spec("torch_npu") is None, reason="needs torch-npu: run `make test-npu-sim`"
    ),
]


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a fresh process: the loader reads its search path once, and devices are per process."""
    path = os.pathsep.join(str(ROOT / source) for source in SOURCES)
    inherited = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=inherited | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def two_steps(backend: str, **environ: str) -> dict[str, Any]:
    done = run(str(SIMULATION / "two_steps.py"), backend, **environ)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_two_optimizer_steps_equal_the_hosts(tmp_path: Path) -> None:
    built = run(str(SIMULATION / "build.py"), str(tmp_path), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert built.returncode == 0, built.stderr
    host = two_steps("cpu", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    simulated = two_steps(
        "npu",
        LD_LIBRARY_PATH=str(tmp_path),
        TASK_QUEUE_ENABLE="0",  # operators run when they are called, so that the host reads finished results
        TORCH_NPU_FALLBACK_CPU_DISABLE="1",  # an operator that is not simulated is an error
    )
    assert (host["devices"], host["dist_backend"]) == (["cpu"], "gloo")
    assert (simulated["devices"], simulated["dist_backend"]) == (["npu:0"], "hccl")
    assert 0 < simulated["memory"]["allocated"] <= simulated["memory"]["reserved"]
    for key in ("losses", "norms", "weights"):
        assert simulated[key] == host[key], key
    assert simulated["losses"][1] < simulated["losses"][0]
