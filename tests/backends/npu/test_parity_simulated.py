"""``anygauge parity`` between the CPU and a simulated NPU: calls and shapes, never an Ascend's numerics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.npu_sim, pytest.mark.timeout(300)]


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_no_op_diverges_between_the_host_and_a_simulated_npu(
    simulated: Callable[..., Any], engine: str
) -> None:
    sides = [f"{backend}:engine={engine}" for backend in ("cpu", "npu")]
    result = simulated("-m", "anygauge", "parity", *sides, "--layers", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert next(line for line in lines if line.startswith("B  npu")).endswith(
        "(SIMULATED: 1 x Ascend910B3, no hardware, no CANN)"
    )
    assert any("anygauge_cpu.kernels.rms_norm | torch_npu.npu_rms_norm" in line for line in lines)
    assert lines[-1] == "no difference is beyond its limit"
