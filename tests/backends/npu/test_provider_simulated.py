"""MindSpeed's stand-in and torch-npu's real transfer on a simulated NPU: plumbing, never numerics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

pytestmark = pytest.mark.npu_sim

HERE = Path(__file__).parent
Run = Callable[..., CompletedProcess[str]]


def reported(done: CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.fixture(scope="module")
def report(simulated: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    log = tmp_path_factory.mktemp("logs") / "actor-0.log"
    return reported(
        simulated(str(HERE / "programs/provider_steps.py"), str(log), FAKE_MINDSPEED_TRANSFER="1")
    )


def test_the_steps_are_those_of_the_device_scope(report: dict[str, Any], simulated: Run) -> None:
    plain = reported(simulated(str(HERE / "programs/two_steps.py"), "npu"))
    assert not report["has_scope"]  # the names of CUDA mean the NPU in the whole process
    for key in ("losses", "norms", "weights", "devices"):
        assert report[key] == plain[key], key


def test_all_that_the_transfer_replaces_is_listed_and_expected(report: dict[str, Any]) -> None:
    replaced = {each["name"]: each for each in report["replaced"]}
    transfer = {name for name, each in replaced.items() if each["by"].startswith("torch_npu.")}
    assert {"torch.Generator", "torch.Tensor.to", "torch.cuda.set_device"} <= transfer
    assert len(transfer) > 100
    assert [name for name, each in replaced.items() if not each["expected"]] == []
