"""Devices, groups and weights over HCCL on two simulated NPUs: plumbing, never HCCL's own behavior."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.npu_sim, pytest.mark.timeout(300)]

CASES = Path(__file__).with_name("comm_cases.py")
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 10_000}
TURNS = ("weights", "nothing", "everything")

Train = Callable[..., list[Any]]


def test_a_device_is_set_up_as_documented(crews: Mapping[str, Any]) -> None:
    for rank, found in enumerate(crews["npu"].run(world=2, action=f"{CASES}:device")):
        assert found["hf32"] == (False, False)
        assert not found["compiles"]
        assert found["fused"]
        assert found["state"] == dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), f"npu:{rank}")
        assert "Out of memory in phase load" in found["full"]
        assert f"Memory of npu:{rank} in GiB" in found["full"]
        assert found["pinned"]
        assert found["accelerator"] == "npu"


def test_options_reach_the_default_group(crews: Mapping[str, Any]) -> None:
    for found in crews["npu"].run(world=2, action=f"{CASES}:options"):
        assert found["default"] == {
            "class": "torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options",
            "config": {"hccl_buffer_size": 32},
            "timeout_s": 60.0,
        }
        assert (found["other"]["config"], found["other"]["timeout_s"]) == ({}, 30.0)


def test_a_group_of_trainer_and_server_is_formed_over_ipv6(crews: Mapping[str, Any]) -> None:
    for received in crews["npu"].run(world=2, action=f"{CASES}:ipv6"):
        assert received.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_weights_reach_a_server_on_another_npu(crews: Mapping[str, Any]) -> None:
    npu, cpu = (crews[backend].run(world=1, action=f"{CASES}:push")[0] for backend in ("npu", "cpu"))
    assert npu.keys() == {1, 2}
    assert len(npu[1]) == 5
    assert npu == cpu
    assert npu[1] != npu[2]


def test_groups_that_are_released_between_steps_change_no_digit(train: Train) -> None:
    case = {"action": "take_turns", "train": {"megatron": OVERLAP}, "references": True}
    (npu, kept), (cpu, _) = (train(backend, "tied", turns=TURNS, **case) for backend in ("npu", "cpu"))
    assert npu["metrics"] == kept["metrics"] == cpu["metrics"]
    assert all(torch.equal(npu["weights"][name], weight) for name, weight in cpu["weights"].items())
