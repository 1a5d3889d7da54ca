"""Faults of the device object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from backend_faults.fault import Fault, reached

Method = Callable[..., Any]


def device_fault(name: str, statement: str, **members: Callable[[Any], Any]) -> Fault:
    """Return a fault of some members; each is made of the vendor's own."""
    return Fault(f"device.{name}", statement, "make_device", partial(_change, members))


def _change(members: Mapping[str, Callable[[Any], Any]], device: Any, _: SimpleNamespace) -> Any:
    for name, make in members.items():
        own = getattr(device, name, None)
        faulty = make(own)
        if faulty is not own:
            reached()
            setattr(device, name, faulty)
    return device


def scope_fault(name: str, statement: str, change: Callable[[Any], Any]) -> Fault:
    """Return a fault of the map of Megatron's literal device names."""
    return device_fault(f"scope_{name}", statement, scope_map=lambda own: own if own is None else change(own))


def _functions(**changed: Any) -> Callable[[Any], Any]:
    return lambda scope: replace(scope, functions={**scope.functions, **changed})


def _without(*names: str) -> Callable[[Any], Any]:
    return lambda scope: replace(
        scope, functions={k: v for k, v in scope.functions.items() if k not in names}
    )


def _memory(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Callable[[Any], Any]:
    return lambda own: lambda: change(dict(own()))


def _kept_state(own: Method) -> Method:
    return lambda first=[]: (first.append(own()) if not first else None, first[0])[1]


def _recorded_nothing(work: Callable[[], None]) -> Any:
    return SimpleNamespace(replay=lambda: None)


def _recorded_once(work: Callable[[], None]) -> Any:
    """Record a work whose replay does it on the numbers of the first time: it does nothing after that."""
    left = [work]
    return SimpleNamespace(replay=lambda: left.pop()() if left else None)


def _raising(*given: Any, **named: Any) -> Any:
    raise RuntimeError("not implemented by this driver")


def _seeds_alone(state: Any) -> None:
    torch.manual_seed(int.from_bytes(bytes(state[:8].tolist()), "little"))  # torch's states begin with it


def _nothing(*given: Any, **named: Any) -> None:
    pass


def _device_alone(own: Method) -> Method:
    def seed(seed: int) -> None:
        state = torch.get_rng_state()
        own(seed)
        torch.set_rng_state(state)

    return seed


def _seeding(own: Method) -> Method:
    def empty_cache() -> None:
        own()
        torch.manual_seed(0)

    return empty_cache


def _without_arguments(own: Method) -> Method:
    def peak_memory() -> int | None:
        return own()

    return peak_memory


def _peak(own: Method) -> Method:
    """Begin anew at each call, whether or not that is asked for."""

    def peak_memory(*, reset: bool = False) -> int | None:
        return own(reset=True)

    return peak_memory


FAULTS: Sequence[Fault] = (
    device_fault("seed_nothing", "seed does nothing", seed=lambda own: _nothing),
    device_fault("seed_constant", "seed takes 0 for every seed", seed=lambda own: lambda seed: own(0)),
    device_fault(
        "seed_modulo",
        "seed drops the upper bits of a seed above 2^31",
        seed=lambda own: lambda seed: own(seed % (1 << 31)),
    ),
    device_fault(
        "seed_of_host_left",
        "seed leaves the host's generator alone",
        seed=_device_alone,
    ),
    device_fault("state_not_restored", "set_rng_state does nothing", set_rng_state=lambda own: _nothing),
    device_fault("state_kept", "get_rng_state returns its first result again", get_rng_state=_kept_state),
    device_fault(
        "state_dtype", "get_rng_state returns int64", get_rng_state=lambda own: lambda: own().long()
    ),
    device_fault(
        "state_bytes",
        "get_rng_state returns bytes instead of a tensor",
        get_rng_state=lambda own: lambda: bytes(own().tolist()),
    ),
    device_fault(
        "state_draws",
        "get_rng_state moves the generator on",
        get_rng_state=lambda own: lambda: (own(), torch.rand(1))[0],
    ),
    device_fault(
        "state_seeds",
        "set_rng_state seeds with the first byte of a state",
        set_rng_state=lambda own: lambda state: torch.manual_seed(int(state[0])) and None,
    ),
    device_fault(
        "state_position_lost",
        "set_rng_state restores the seed and begins anew with it, so that a resume repeats its dropout",
        set_rng_state=lambda own: _seeds_alone,
    ),
    device_fault(
        "memory_mib", "memory is in MiB", memory=_memory(lambda m: {k: v >> 20 for k, v in m.items()})
    ),
    device_fault(
        "memory_floats", "memory is floats", memory=_memory(lambda m: {k: float(v) for k, v in m.items()})
    ),
    device_fault(
        "memory_none",
        "memory has None for what it does not know",
        memory=_memory(lambda m: {**m, "reserved": None}),
    ),
    device_fault(
        "memory_names",
        "memory has a name of its own",
        memory=_memory(lambda m: {**m, "used": m.get("allocated", 0)}),
    ),
    device_fault(
        "memory_swapped",
        "memory has free for total and total for free",
        memory=_memory(lambda m: {**m, "free": m.get("total", 2), "total": m.get("free", 1)}),
    ),
    device_fault("memory_constant", "memory has the numbers of the first call", memory=_kept_state),
    device_fault("peak_resets", "peak_memory begins anew at each call", peak_memory=_peak),
    device_fault("peak_positional", "peak_memory has no argument reset", peak_memory=_without_arguments),
    device_fault(
        "peak_float",
        "peak_memory is a float",
        peak_memory=lambda own: lambda *, reset=False: float(own(reset=reset) or 0),
    ),
    device_fault(
        "empty_cache_raises", "empty_cache fails where there is no cache", empty_cache=lambda own: _raising
    ),
    device_fault(
        "empty_cache_drops",
        "empty_cache resets the random state",
        empty_cache=_seeding,
    ),
    device_fault("synchronize_raises", "synchronize fails", synchronize=lambda own: _raising),
    device_fault("shareable_none", "shareable returns None", shareable=lambda own: _nothing),
    device_fault(
        "shareable_exit",
        "the context of shareable fails when it is left",
        shareable=lambda own: lambda: closing(object()),
    ),
    device_fault(
        "meters_percent",
        "meters gives utilization in percent",
        meters=lambda own: lambda: {**own(), "utilization": 87.0},
    ),
    device_fault("meters_text", "meters gives texts", meters=lambda own: lambda: {**own(), "power": "300 W"}),
    device_fault(
        "meters_nan", "meters gives NaN", meters=lambda own: lambda: {**own(), "temperature": float("nan")}
    ),
    device_fault("graph_empty", "capture_graph records nothing", capture_graph=lambda own: _recorded_nothing),
    device_fault("graph_once", "a graph can be replayed once", capture_graph=lambda own: _recorded_once),
    device_fault(
        "type_with_index", "type is that of torch_device with its index", type=lambda own: f"{own}:0"
    ),
    device_fault("index_text", "index is a text", index=str),
    device_fault("other_index", "index is that of another device", index=lambda own: own + 1),
    device_fault("device_text", "torch_device is a text", torch_device=str),
    device_fault(
        "device_meta", "torch_device is another device", torch_device=lambda own: torch.device("meta")
    ),
    scope_fault("lacks", "the scope map lacks a function", _without("default_stream")),
    scope_fault(
        "lacks_five",
        "the scope map lacks five functions",
        _without("Event", "Stream", "current_stream", "default_stream", "set_stream"),
    ),
    scope_fault(
        "has_more", "the scope map has one function more", _functions(get_device_name=lambda: "abacus")
    ),
    scope_fault(
        "type", "the scope map is for another device type", lambda scope: replace(scope, device_type="xpu")
    ),
    scope_fault("seed", "manual_seed of the scope map does nothing", _functions(manual_seed=_nothing)),
    scope_fault(
        "seed_all", "manual_seed_all of the scope map does nothing", _functions(manual_seed_all=_nothing)
    ),
    scope_fault("state", "set_rng_state of the scope map does nothing", _functions(set_rng_state=_nothing)),
    scope_fault(
        "state_host",
        "get_rng_state of the scope map is empty",
        _functions(get_rng_state=lambda device=None: torch.empty(0, dtype=torch.uint8)),
    ),
    scope_fault("stream", "stream of the scope map is no context", _functions(stream=_nothing)),
    scope_fault(
        "current_stream", "current_stream of the scope map returns None", _functions(current_stream=_nothing)
    ),
    scope_fault("event", "Event of the scope map takes no arguments", _functions(Event=object)),
    scope_fault("count", "device_count of the scope map is 0", _functions(device_count=lambda: 0)),
    scope_fault(
        "current", "current_device of the scope map is None", _functions(current_device=lambda: None)
    ),
    scope_fault(
        "types",
        "the scope map has no bfloat16 tensor",
        lambda scope: replace(
            scope, tensor_types={k: v for k, v in scope.tensor_types.items() if k != "bf16"}
        ),
    ),
    scope_fault(
        "types_text",
        "the scope map has a text for the types of a dtype",
        lambda scope: replace(scope, tensor_types={k: v[0] for k, v in scope.tensor_types.items()}),
    ),
    scope_fault(
        "index",
        "the scope map says the opposite about indices",
        lambda scope: replace(scope, has_index=not scope.has_index),
    ),
    scope_fault(
        "accelerator",
        "the scope map says the opposite about accelerators",
        lambda scope: replace(scope, is_accelerator=not scope.is_accelerator),
    ),
    scope_fault(
        "pinned",
        "the scope map says the opposite about pinned memory",
        lambda scope: replace(scope, has_pinned_memory=not scope.has_pinned_memory),
    ),
)
