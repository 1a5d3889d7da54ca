"""The scope map stands in for each function that Megatron calls on CUDA (``anygauge_hooks.megatron``)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from anygauge.testing.conformance.process_state import rng_untouched
from anygauge_hooks.megatron import REDIRECTED, ScopeMap, scope_map_of
from anygauge_hooks.types import BackendSpec, Device

pytestmark = pytest.mark.conformance

HOST, NAMED = "cpu", "cuda"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Functions = Mapping[str, Callable[..., Any]]


@pytest.fixture
def scope(device: Device) -> ScopeMap:
    """Return the map; where there is none the literal names mean the device by themselves."""
    scope = scope_map_of(device)
    if scope is None:
        assert torch.zeros(1, device=NAMED).device.type == device.type, "scope_map is missing"
        return ScopeMap(
            device_type=device.type,
            functions={name: getattr(torch.cuda, name) for name in REDIRECTED},
            tensor_types={
                "fp32": ("torch.cuda.FloatTensor",),
                "fp16": ("torch.cuda.HalfTensor",),
                "bf16": ("torch.cuda.BFloat16Tensor",),
            },
        )
    return scope


@pytest.fixture
def functions(scope: ScopeMap) -> Functions:
    return scope.functions


def draw(device: Device) -> torch.Tensor:
    return torch.rand(64, device=device.torch_device).cpu()


def queued(device: Device) -> torch.Tensor:
    """Return ones, the result of work that takes an accelerator longer than the host takes to queue it."""
    size, products = (64, 1) if device.type == HOST else (1024, 8)
    x = torch.full((size, size), 1 / size, device=device.torch_device)
    for _ in range(products):
        x = x @ x
    return x * size


def test_exactly_the_functions_that_the_core_redirects_are_there(scope: ScopeMap) -> None:
    assert set(scope.functions) == set(REDIRECTED)
    assert all(map(callable, scope.functions.values()))


def test_facts_of_the_map_are_those_of_the_device(
    scope: ScopeMap, backend: BackendSpec, device: Device
) -> None:
    here = torch.zeros(1, device=device.torch_device).device
    assert scope.device_type == backend.device_type
    assert scope.is_accelerator == (device.type != HOST)
    assert scope.has_index == (here.index is not None)
    if scope.has_pinned_memory:
        assert torch.zeros(4).pin_memory().is_pinned()


def test_tensor_types_name_the_types_of_tensors(scope: ScopeMap, device: Device) -> None:
    assert set(scope.tensor_types) == set(DTYPES)
    own = max((name.rpartition(".")[0] for names in scope.tensor_types.values() for name in names), key=len)
    for name, dtype in DTYPES.items():
        kind: Any = torch.zeros(1, dtype=dtype, device=device.torch_device).type()
        assert kind in scope.tensor_types[name]
        assert kind.rpartition(".")[0] == own, "the longest prefix is that of the device"
        for each in scope.tensor_types[name]:
            assert operator.attrgetter(each.removeprefix("torch."))(torch)


def test_devices_are_counted_and_named(functions: Functions, device: Device) -> None:
    here = torch.zeros(1, device=device.torch_device).device
    count = functions["device_count"]()
    assert type(count) is int
    assert count >= 1
    if device.type != HOST:
        assert count == torch.get_device_module(device.type).device_count()
    assert functions["is_available"]() is (device.type != HOST)
    assert torch.zeros(1, device=functions["current_device"]()).device == here
    assert isinstance(functions["current_device"](), int | str | torch.device)
    functions["set_device"](functions["current_device"]())
    assert torch.zeros(1, device=functions["current_device"]()).device == here


@pytest.mark.parametrize("name", ["manual_seed", "manual_seed_all"])
def test_seeding_reaches_the_device(functions: Functions, device: Device, name: str) -> None:
    drawn = []
    for seed in (99, 99, 100):
        functions[name](seed)
        drawn.append(draw(device))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    device.seed(99)
    assert torch.equal(draw(device), drawn[0]), "it seeds otherwise than the device does"


def test_torch_may_seed_by_what_stands_in(
    functions: Functions, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "manual_seed_all", functions["manual_seed_all"])
    torch.manual_seed(3)  # it calls that function, which must not call it again
    first = draw(device)
    torch.manual_seed(3)
    assert torch.equal(draw(device), first)


@pytest.mark.parametrize("arguments", [(), (NAMED,), (torch.device(NAMED),)], ids=["none", "text", "device"])
def test_rng_state_is_the_devices(functions: Functions, device: Device, arguments: tuple[Any, ...]) -> None:
    functions["manual_seed"](99)
    state = functions["get_rng_state"](*arguments)
    assert torch.equal(state, device.get_rng_state())
    kept, expected = state.clone(), draw(device)
    assert torch.equal(state, kept), "a state changes with the generator"
    for _ in range(2):
        functions["manual_seed"](5)
        functions["set_rng_state"](state, *arguments)
        assert torch.equal(draw(device), expected)


def test_what_has_nothing_to_do_with_random_numbers_draws_none(functions: Functions, device: Device) -> None:
    seeding = ("manual_seed", "manual_seed_all", "set_rng_state", "set_device", "set_stream", "stream")
    with rng_untouched(device):
        for name in set(REDIRECTED) - set(seeding):
            functions[name]()


def test_a_stream_is_current_inside_its_context_alone(functions: Functions, device: Device) -> None:
    before, side = functions["current_stream"](), functions["Stream"]()
    with functions["stream"](side):
        inside = functions["current_stream"]()
    with pytest.raises(KeyError), functions["stream"](side):
        raise KeyError
    with functions["stream"](None):
        pass
    if device.type != HOST:
        assert inside == side
        assert functions["current_stream"]() == before
        functions["set_stream"](side)
        assert functions["current_stream"]() == side
    functions["set_stream"](before)
    if device.type != HOST:
        assert functions["current_stream"]() == before == functions["default_stream"]()


@pytest.mark.parametrize(
    "way", ["wait_stream", "wait_event", "record_event", "synchronize", "event", "device"]
)
def test_what_waits_for_a_stream_sees_its_work(functions: Functions, device: Device, way: str) -> None:
    side, event = functions["Stream"](), functions["Event"]()
    side.wait_stream(functions["current_stream"]())
    with functions["stream"](side):
        done = queued(device)
        event.record()
    current = functions["current_stream"]()
    if way == "wait_stream":
        current.wait_stream(side)
    elif way == "wait_event":
        current.wait_event(event)
    elif way == "record_event":
        current.wait_event(side.record_event())
    elif way == "event":
        event.wait()
        event.synchronize()
        assert event.query()
    else:
        {"synchronize": side.synchronize, "device": functions["synchronize"]}[way]()
        assert side.query()
    assert bool((done == 1).all())


def test_the_cache_is_emptied_without_harm(functions: Functions, device: Device) -> None:
    ones = torch.ones(16, device=device.torch_device)
    functions["empty_cache"]()
    assert ones.sum().item() == 16
