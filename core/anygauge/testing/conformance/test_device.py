"""The device object keeps the promises of ``anygauge_hooks.types.Device``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from anygauge.device import is_out_of_memory
from anygauge.plugins import Plugins
from anygauge.testing.conformance.process_state import rng_untouched, state_untouched
from anygauge_hooks.types import BackendSpec, Device

pytestmark = pytest.mark.conformance

BYTE_COUNTS = {"allocated", "reserved", "free", "total"}
METERS = {"utilization", "power", "temperature", "clock", "power_capped", "thermal_slowed"}
SHARES = ("utilization", "power_capped", "thermal_slowed")
HOST = "cpu"
LARGE = 1 << 26
"""Bytes. Allocators take more than 32 MiB from the system and return it at once."""
SLACK = LARGE // 4
QUEUED = 8
"""Matrix products that keep an accelerator busy for longer than the host takes to ask for their end."""


def draw(device: Device) -> torch.Tensor:
    return torch.rand(64, device=device.torch_device).cpu()


def allocate_large(device: Device) -> torch.Tensor:
    """Return LARGE bytes of the device's memory, each of them written."""
    return torch.full((LARGE,), 1, dtype=torch.uint8, device=device.torch_device)


def indices(backend: BackendSpec) -> range:
    """Return the indices of the devices that this process sees."""
    host = backend.device_type == HOST
    return range(1 if host else torch.get_device_module(backend.device_type).device_count())


def test_device_is_the_backends(backend: BackendSpec, device: Device) -> None:
    assert device.type == backend.device_type
    assert device.index == 0
    assert isinstance(device.torch_device, torch.device)
    made = torch.zeros(1, device=device.torch_device).device
    assert made == torch.zeros(1, device=backend.device_type).device, "it is not the current device"
    assert made.type == backend.device_type
    assert made.index in (None, device.index)


def test_each_index_has_a_device_of_its_own(plugins: Plugins, backend: BackendSpec, device: Device) -> None:
    try:
        for index in indices(backend):
            other = plugins.make_device(backend, index)
            assert other.index == index
            assert torch.zeros(1, device=other.torch_device).device.index in (None, index)
    finally:
        plugins.make_device(backend, device.index)  # is the current one again


def test_an_index_without_a_device_is_refused(plugins: Plugins, backend: BackendSpec, device: Device) -> None:
    if device.type == HOST:
        return  # each worker has the whole host
    with pytest.raises(Exception, match=r"."):
        plugins.make_device(backend, len(indices(backend)))
    assert torch.zeros(1, device=device.type).device.index in (None, device.index)


# -------------------------------------------------------------------------
# Random numbers
# -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1234, 2**40 + 1])
def test_seed_repeats_host_and_device_draws(device: Device, seed: int) -> None:
    device.seed(seed)
    first = draw(device), torch.rand(8)
    device.seed(seed)
    again = draw(device), torch.rand(8)
    for one, same in zip(first, again, strict=True):
        assert torch.equal(one, same)
    for other in (seed + 1, seed + 2**31):
        device.seed(other)
        for one, different in zip(first, (draw(device), torch.rand(8)), strict=True):
            assert not torch.equal(one, different)


def test_seed_reaches_every_device_of_the_process(backend: BackendSpec, device: Device) -> None:
    places = [device.torch_device if device.type == HOST else f"{device.type}:{i}" for i in indices(backend)]
    drawn = []
    for seed in (5, 5, 6):
        device.seed(seed)
        drawn.append([torch.rand(8, device=place).tolist() for place in places])
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))


def test_rng_state_round_trip(device: Device) -> None:
    device.seed(7)
    draw(device)
    state = device.get_rng_state()
    assert state.dtype == torch.uint8
    assert state.device.type == HOST
    kept = state.clone()
    expected = [draw(device), draw(device)]
    assert not torch.equal(*expected)
    assert torch.equal(state, kept), "a state changes with the generator"
    for _ in range(2):
        device.seed(8)
        device.set_rng_state(state)
        assert torch.equal(device.get_rng_state(), kept)
        assert all(torch.equal(draw(device), each) for each in expected)
        assert torch.equal(state, kept)


def test_rng_state_is_the_devices_alone(device: Device) -> None:
    if device.type == HOST:
        return  # it has one generator
    device.seed(7)
    state, host = device.get_rng_state(), torch.get_rng_state()
    draw(device)
    assert not torch.equal(device.get_rng_state(), state)
    torch.rand(8)
    moved = torch.get_rng_state()
    device.set_rng_state(state)
    assert torch.equal(torch.get_rng_state(), moved)
    assert not torch.equal(moved, host)


def test_a_bad_rng_state_is_refused(device: Device) -> None:
    with rng_untouched(device), pytest.raises((RuntimeError, TypeError, ValueError)):
        device.set_rng_state(torch.zeros(3, dtype=torch.uint8))


@pytest.mark.parametrize(
    "call",
    [
        lambda device: device.get_rng_state(),
        lambda device: device.set_rng_state(device.get_rng_state()),
        lambda device: device.synchronize(),
        lambda device: device.memory(),
        lambda device: device.peak_memory(),
        lambda device: device.peak_memory(reset=True),
        lambda device: device.empty_cache(),
        lambda device: device.meters(),
        lambda device: device.shareable().__enter__(),
    ],
    ids=[
        "get_rng_state",
        "set_rng_state",
        "synchronize",
        "memory",
        "peak",
        "reset",
        "cache",
        "meters",
        "shared",
    ],
)
def test_what_is_asked_of_a_device_changes_nothing_else(
    device: Device, call: Callable[[Any], object]
) -> None:
    ones = torch.ones(16, device=device.torch_device)
    with rng_untouched(device), state_untouched():
        call(device)
    assert ones.sum().item() == 16
    assert torch.zeros(1, device=device.type).device == ones.device


# -------------------------------------------------------------------------
# Memory
# -------------------------------------------------------------------------


def test_memory_counts_bytes(device: Device) -> None:
    held = torch.ones(1 << 20, device=device.torch_device)
    memory = device.memory()
    assert {"allocated"} <= memory.keys() <= BYTE_COUNTS
    assert all(type(count) is int for count in memory.values())
    assert memory["allocated"] >= held.nbytes
    assert min(memory.values()) >= 0
    assert memory.get("free", 0) <= memory.get("total", memory.get("free", 0))
    assert memory["allocated"] <= memory.get("reserved", memory["allocated"])
    assert memory["allocated"] <= memory.get("total", memory["allocated"])


def test_allocated_memory_grows_and_shrinks(device: Device) -> None:
    before = device.memory()["allocated"]
    held = allocate_large(device)
    during = device.memory()
    assert during["allocated"] - before > LARGE - SLACK
    del held
    assert during["allocated"] - device.memory()["allocated"] > LARGE - SLACK
    device.empty_cache()
    if "reserved" in during:
        assert during["reserved"] - device.memory()["reserved"] > LARGE - SLACK


def test_peak_memory_counts_what_is_gone(device: Device) -> None:
    if device.peak_memory(reset=True) is None:
        return  # the backend does not know it
    before = device.memory()["allocated"]
    held = allocate_large(device)
    del held
    peaks = [device.peak_memory(), device.peak_memory(), device.peak_memory(reset=True)]
    for peak in peaks:
        assert type(peak) is int
        assert peak - before > LARGE - SLACK
    after = device.peak_memory()
    assert after is not None
    assert after >= device.memory()["allocated"] - SLACK
    if device.type != HOST:  # some systems count the host's from the start of the process alone
        assert before + LARGE - after > SLACK


def test_synchronize_and_empty_cache_keep_tensors(device: Device) -> None:
    ones = torch.ones(16, device=device.torch_device)
    device.synchronize()
    device.empty_cache()
    assert ones.sum().item() == 16


def test_memory_that_can_be_shared_is_as_good_as_other(device: Device) -> None:
    for _ in range(2):
        with device.shareable():
            held = torch.ones(1 << 20, device=device.torch_device)
        assert held.sum().item() == 1 << 20
        assert torch.ones(16, device=device.torch_device).sum().item() == 16


def test_an_error_leaves_the_context_of_shared_memory(device: Device) -> None:
    with pytest.raises(KeyError), device.shareable():
        raise KeyError
    assert torch.ones(16, device=device.torch_device).sum().item() == 16


def test_a_device_without_room_says_so_and_goes_on(device: Device) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as error:
        torch.empty(1 << 60, dtype=torch.uint8, device=device.torch_device)
    assert is_out_of_memory(error.value), "the allocator's words are unknown: a run could not explain them"
    assert torch.ones(16, device=device.torch_device).sum().item() == 16


# -------------------------------------------------------------------------
# Work
# -------------------------------------------------------------------------


def test_synchronize_waits_for_every_stream(device: Device) -> None:
    if device.type == HOST:
        return  # nothing is queued
    module = torch.get_device_module(device.type)
    side, events = module.Stream(), [module.Event(), module.Event()]
    x = torch.full((1024, 1024), 2.0**-10, device=device.torch_device)
    for stream, event in zip((module.current_stream(), side), events, strict=True):
        with module.stream(stream):
            for _ in range(QUEUED):
                x @ x
            event.record()
    device.synchronize()
    assert [event.query() for event in events] == [True, True]


def test_meters_are_of_known_names_and_ranges(device: Device) -> None:
    for meters in (device.meters(), device.meters()):
        assert meters.keys() <= METERS
        assert all(math.isfinite(value) and value >= 0 for value in meters.values())
        assert all(meters.get(name, 0) <= 1 for name in SHARES)


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
