"""The device object keeps the promises of ``anygauge_hooks.types.Device``."""

from __future__ import annotations

import pytest
import torch

from anygauge_hooks.types import BackendSpec, Device

pytestmark = pytest.mark.conformance

BYTE_COUNTS = {"allocated", "reserved", "free", "total"}
METERS = {"utilization", "power", "temperature", "clock", "power_capped", "thermal_slowed"}


def draw(device: Device) -> torch.Tensor:
    return torch.rand(64, device=device.torch_device).cpu()


def test_device_is_the_backends(backend: BackendSpec, device: Device) -> None:
    assert device.type == backend.device_type
    assert device.index == 0
    assert torch.zeros(1, device=device.torch_device).device.type == backend.device_type


def test_seed_repeats_host_and_device_draws(device: Device) -> None:
    device.seed(1234)
    first = draw(device), torch.rand(8)
    device.seed(1234)
    again = draw(device), torch.rand(8)
    device.seed(4321)
    other = draw(device), torch.rand(8)
    for one, same, different in zip(first, again, other, strict=True):
        assert torch.equal(one, same)
        assert not torch.equal(one, different)


def test_rng_state_round_trip(device: Device) -> None:
    device.seed(7)
    draw(device)
    state = device.get_rng_state()
    assert state.dtype == torch.uint8
    assert state.device.type == "cpu"
    expected = draw(device)
    assert not torch.equal(draw(device), expected)
    device.set_rng_state(state)
    assert torch.equal(draw(device), expected)


def test_memory_counts_bytes(device: Device) -> None:
    held = torch.ones(1 << 20, device=device.torch_device)
    memory = device.memory()
    assert memory.keys() <= BYTE_COUNTS
    assert memory["allocated"] >= held.nbytes
    assert min(memory.values()) >= 0
    assert memory.get("free", 0) <= memory.get("total", memory.get("free", 0))


def test_peak_memory_counts_what_is_gone(device: Device) -> None:
    if device.peak_memory(reset=True) is None:
        return  # the backend does not know it
    before = device.memory()["allocated"]
    held = torch.ones(1 << 24, device=device.torch_device)
    del held
    peak = device.peak_memory()
    assert peak is not None
    assert peak >= before + (1 << 24)


def test_synchronize_and_empty_cache_keep_tensors(device: Device) -> None:
    ones = torch.ones(16, device=device.torch_device)
    device.synchronize()
    device.empty_cache()
    assert ones.sum().item() == 16


def test_memory_that_can_be_shared_is_as_good_as_other(device: Device) -> None:
    with device.shareable():
        held = torch.ones(1 << 20, device=device.torch_device)
    assert held.sum().item() == 1 << 20
    assert torch.ones(16, device=device.torch_device).sum().item() == 16


def test_meters_are_of_known_names_and_ranges(device: Device) -> None:
    for meters in (device.meters(), device.meters()):
        assert meters.keys() <= METERS
        assert all(value >= 0 for value in meters.values())
        assert meters.get("utilization", 0) <= 1


def test_a_recorded_graph_does_its_work_again(device: Device) -> None:
    if device.capture_graph is None:
        return  # the device records nothing
    x, weight = (torch.rand(8, 8, device=device.torch_device) for _ in range(2))
    kept = {}

    def work() -> None:
        kept["y"] = x @ weight

    graph = device.capture_graph(work)
    for scale in (1, 2):
        x.fill_(scale)
        weight.fill_(scale)  # weights are replaced in place between two replays
        graph.replay()
        assert bool((kept["y"] == 8 * scale**2).all())


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_a_device_goes_on_where_work_cannot_be_recorded(device: Device) -> None:
    if device.capture_graph is None:
        return
    x = torch.ones(4, device=device.torch_device)

    def waits() -> None:
        x.tolist()

    with pytest.raises(RuntimeError):
        device.capture_graph(waits)
    test_a_recorded_graph_does_its_work_again(device)
    assert (x + torch.ones_like(x)).tolist() == [2.0] * 4
