"""The train engine on two simulated NPUs over ProcessGroupHCCL: the digits of the host's over gloo.

Both train with the reference kernels, so that the same sums are taken in the same order and every digit can
be compared. It shows that tensors, collectives and Megatron's own device code are where they belong; never
an Ascend's numerics. The cases are those of ``tests/distributed``.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.npu_sim, pytest.mark.timeout(300)]

DISTRIBUTED = Path(__file__).parents[2] / "distributed"
MODES = runpy.run_path(str(DISTRIBUTED / "test_parallel_modes.py"))
CHECKPOINTS = str(DISTRIBUTED / "checkpoint_cases.py")
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dp2": ("tied", {}, {}),
    "dp2-overlap-recompute": ("tied", {}, {**MODES["OVERLAP"], "recompute": "full"}),
    "tp2-sp": ("untied", {"tensor": 2}, {"recompute": "selective"}),
    "pp2": ("tied", {"pipeline": 2}, {}),
    "vpp2-overlap": ("tied", {"pipeline": 2, "virtual_pipeline": 2}, MODES["OVERLAP"]),
    "cp2": ("tied", {"context": 2}, {"recompute": "full"}),
    "ep2": ("experts", {"expert": 2}, {}),
    "angles-of-neighbors-tp2": ("post-norms", {"tensor": 2}, {}),
}

Train = Callable[..., list[Any]]


@pytest.mark.parametrize("mode", CASES)
def test_every_digit_is_the_hosts(train: Train, mode: str) -> None:
    name, parallel, settings = CASES[mode]
    host, npu = (
        train(backend, name, parallel=parallel, train=settings, references=True) for backend in ("cpu", "npu")
    )
    for rank, (one, other) in enumerate(zip(host, npu, strict=True)):
        assert other["whereabouts"] == {"devices": {f"npu:{rank}"}, "backends": {"hccl"}}
        assert one["whereabouts"] == {"devices": {"cpu"}, "backends": {"gloo_serial"}}
        assert other["division"] == one["division"]
        assert other["metrics"] == one["metrics"]
        for key in ("before", "after", "weights"):
            assert_same_bits(other[key], one[key])


def assert_same_bits(found: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize(("name", "parallel"), [("tied", {}), ("experts", {"expert": 2}), ("post-norms", {})])
def test_fused_kernels_change_the_rounding_alone(train: Train, name: str, parallel: dict[str, Any]) -> None:
    """Compare the backend's kernels with those of the host: the order of sums differs."""
    host, npu = (train(backend, name, parallel=parallel) for backend in ("cpu", "npu"))
    whole = {**host[0], **{when: {**host[0][when], **host[1][when]} for when in ("before", "after")}}
    MODES["assert_same"](npu, whole)


def test_a_checkpoint_goes_on_in_another_layout_and_on_another_device(train: Train, tmp_path: Path) -> None:
    def run(backend: str, action: str, parallel: dict[str, int], **paths: str) -> list[Any]:
        given = {name: str(tmp_path / path) for name, path in paths.items()}
        return train(
            backend, "tied", action=f"{CHECKPOINTS}:{action}", parallel=parallel, references=True, **given
        )

    tensor, pipeline = {"tensor": 2}, {"pipeline": 2}
    of_host = run("cpu", "saved", tensor, target="cpu")
    of_npu = run("npu", "saved", tensor, target="npu")
    assert_same_step(of_npu, of_host)
    on_host = run("cpu", "resumed", pipeline, source="cpu", target="cpu-cpu")
    for source in ("cpu", "npu"):
        assert_same_step(run("npu", "resumed", pipeline, source=source, target=f"{source}-npu"), on_host)
    assert_same_step(run("cpu", "resumed", pipeline, source="npu", target="npu-cpu"), on_host)
    assert_same_bits(on_host[0]["before"], of_host[0]["before"])


def assert_same_step(found: list[Any], expected: list[Any]) -> None:
    """Compare weights before and after a step, and its metrics, to the bit on each rank."""
    for one, other in zip(found, expected, strict=True):
        assert one["metrics"] == other["metrics"]
        assert_same_bits(one["before"], other["before"])
        assert_same_bits(one["after"], other["after"])
