"""The device object of a real NPU, and what doctor says of its host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Run = Callable[..., str]

pytestmark = [pytest.mark.npu_hw, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]


def test_doctor_passes(run: Run) -> None:
    run("-m", "anygauge", "doctor", "--backend", "npu")


def test_draws_repeat_from_a_seed_and_from_a_state(npu: Any) -> None:
    npu.seed(1)
    first = torch.rand(1000, device=npu.torch_device)
    state = npu.get_rng_state()
    second = torch.rand(1000, device=npu.torch_device)
    npu.seed(1)
    assert torch.equal(torch.rand(1000, device=npu.torch_device), first)
    npu.set_rng_state(state)
    assert torch.equal(torch.rand(1000, device=npu.torch_device), second)
    assert not torch.equal(first, second)


def test_memory_is_counted_and_given_back(npu: Any) -> None:
    npu.empty_cache()
    npu.peak_memory(reset=True)
    before = npu.memory()
    tensor = torch.zeros(1 << 28, device=npu.torch_device)
    npu.synchronize()
    held = npu.memory()
    assert held["allocated"] - before["allocated"] == pytest.approx(tensor.nbytes, rel=0.01)
    assert npu.peak_memory() >= before["allocated"] + tensor.nbytes
    del tensor
    npu.empty_cache()
    assert npu.memory()["free"] >= held["free"] + (1 << 29)


def test_work_of_two_streams_is_ordered_by_an_event(npu: Any) -> None:
    functions = npu.scope_map.functions
    side, done = functions["Stream"](), functions["Event"]()
    x = torch.ones(4096, 4096, device=npu.torch_device)
    with functions["stream"](side):
        side.wait_stream(functions["default_stream"]())
        y = x @ x
        done.record()
    functions["current_stream"]().wait_event(done)
    assert y.float().mean().item() == 4096
