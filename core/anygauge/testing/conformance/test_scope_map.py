"""A device to which Megatron's literal device names are redirected has the functions that Megatron calls."""

from __future__ import annotations

import pytest
import torch

from anygauge_hooks.megatron import ScopeMap, scope_map_of
from anygauge_hooks.types import BackendSpec, Device

pytestmark = pytest.mark.conformance

NEEDED_FUNCTIONS = {
    "current_device",
    "device_count",
    "get_rng_state",
    "is_available",
    "manual_seed",
    "set_device",
    "set_rng_state",
    "synchronize",
}
"""Functions of an accelerator's torch module that a training step calls, whatever its layout."""


@pytest.fixture
def scope(device: Device) -> ScopeMap:
    """Return the device's map."""
    scope = scope_map_of(device)
    if scope is None:
        pytest.skip("literal device names mean this device")
    return scope


def test_tensor_types_name_the_types_of_tensors(device: Device, scope: ScopeMap) -> None:
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        tensor = torch.zeros(1, dtype=dtype, device=device.torch_device)
        assert tensor.type() in scope.tensor_types[name]


def test_scope_map_redirects_what_a_step_needs(backend: BackendSpec, scope: ScopeMap) -> None:
    assert scope.device_type == backend.device_type
    assert scope.functions.keys() >= NEEDED_FUNCTIONS
    assert all(callable(function) for function in scope.functions.values())
    assert scope.functions["device_count"]() >= 1


def test_scope_map_rng_is_the_devices(device: Device, scope: ScopeMap) -> None:
    scope.functions["manual_seed"](99)
    state = scope.functions["get_rng_state"]()
    expected = torch.rand(64, device=device.torch_device).cpu()
    scope.functions["set_rng_state"](state)
    assert torch.equal(torch.rand(64, device=device.torch_device).cpu(), expected)
