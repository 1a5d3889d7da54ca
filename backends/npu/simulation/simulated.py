"""Run torch-npu's operators on the host, on the bytes of the simulated devices.

Everything else is the wheel's own: allocator, streams, events, autograd, random states, ProcessGroupHCCL. It
shows device plumbing. It never shows an Ascend's numerics, speed or ordering.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from simulation import aten, operators

__all__ = ["install", "is_simulated"]

_NATIVE = frozenset(
    {
        "_pin_memory",
        "_reshape_alias",
        "_resize_",
        "_unsafe_view",
        "alias",
        "as_strided",
        "as_strided_",
        "chunk",
        "detach",
        "empty.memory_format",
        "empty_strided",
        "expand",
        "is_pinned",
        "is_set_to",
        "permute",
        "pin_memory",
        "record_stream",
        "resize_",
        "resize_as_",
        "select",
        "set_",
        "slice",
        "split",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
    }
)
"""Operators that only make tensors or views: torch-npu's own kernels do that without the device."""

_HOST_KEYS = (
    "CPU",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)
_DRAWS_PER_CALL = 4
"""How far a random operator moves the generator's offset; real ones move it by what they draw."""

_libraries: list[torch.library.Library] = []
_host_generator = threading.Lock()


def is_simulated() -> bool:
    """Return whether this process has loaded the simulation's libraries, and not CANN's."""
    try:
        return hasattr(ctypes.CDLL("libascendcl.so"), "simulated_npu")
    except OSError:
        return False


def install() -> int:
    """Put a host kernel in the place of torch-npu's, wherever torch, ``aten.py`` or ``operators.py`` has one.

    The others stay torch-npu's own. They check their arguments, and then fail: the device has no kernels.

    :returns: The number of kernels; 0 where they are there already.
    :raises RuntimeError: The libraries that are loaded are not the simulation's.
    """
    if not is_simulated():
        raise RuntimeError("The simulation replaces no kernel of a real NPU: start it with its launcher.")
    if _libraries:
        return 0
    importlib.import_module("torch_npu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*verriding a previously registered kernel.*")
        return _install("aten", _host_kernel) + _install("npu", lambda name, op: None) + _install_attention()


def _install(namespace: str, otherwise: Callable[[str, Any], Any]) -> int:
    library = torch.library.Library(namespace, "IMPL")
    _libraries.append(library)  # a library that is collected takes its kernels with it
    count = 0
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith(f"{namespace}::") or not _has_kernel(name, "PrivateUse1"):
            continue
        op = _operator(name)
        function = op and (_reference(name) or otherwise(name, op))
        if function is not None:
            library.impl(op, functools.partial(_run, op, function), "PrivateUse1", allow_override=True)
            count += 1
    return count


def _reference(name: str) -> Any:
    """Return the function that stands for an operator on the host, or ``None``."""
    base = name.partition(".")[0]
    fused = operators.OPERATORS.get(base.removeprefix("npu::")) if base.startswith("npu::") else None
    return fused or aten.OPERATORS.get(name) or aten.OPERATORS.get(base)


def _install_attention() -> int:
    """Make attention of simple operators: torch-npu's goes to a kernel past the dispatcher."""
    kernel = torch.ops.aten.scaled_dot_product_attention.default
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        _libraries[0].impl(kernel, _attention, key, allow_override=True)
    return 1


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    attended: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(*args, **kwargs)[0]
    return attended


def _has_kernel(name: str, key: str) -> bool:
    has: bool = torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    return has


def _operator(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return getattr(packet, overload or "default", None)


def _host_kernel(name: str, op: Any) -> Any:
    """Return the operator itself, which host tensors lead to the host's kernel, or ``None``."""
    short = name.removeprefix("aten::")
    if not _NATIVE.isdisjoint({short, short.partition(".")[0]}):
        return None
    return op if any(_has_kernel(name, key) for key in _HOST_KEYS) else None


def _run(op: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function on host views of an operator's arguments, and return its results on the device."""
    given = [value for value in tree_leaves((args, kwargs)) if _on_device(value)]
    views = {id(tensor): _host_view(tensor) for tensor in given}
    device = _target(kwargs.get("device"), given)

    def down(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "npu" else value
        return views.get(id(value), value)

    with contextlib.ExitStack() as stack:
        if torch.Tag.nondeterministic_seeded in op.tags:
            args, kwargs = stack.enter_context(_drawing(device, args, kwargs))
        if function is not op:
            stack.enter_context(_autograd())
        host_args, host_kwargs = tree_map(down, args), tree_map(down, kwargs)
        if device.type == "npu" and host_kwargs.get("pin_memory") is not None:
            host_kwargs["pin_memory"] = False
        result = function(*host_args, **host_kwargs)
    if function is not op:
        _check_results(op, args, kwargs, result)
    return _returned(result, [(tensor, views[id(tensor)]) for tensor in given], device)


def _target(asked: Any, given: list[torch.Tensor]) -> torch.device:
    """Return where results go: the device that is asked for, that of the arguments, or the current one."""
    device = torch.device(asked) if asked is not None else given[0].device if given else torch.device("npu")
    if device.type == "npu" and device.index is None:
        return torch.device("npu", torch.npu.current_device())
    return device


def _returned(result: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> Any:
    """Return what an operator returns, with device tensors in the place of host tensors.

    :param pairs: The device tensors that it was given, with their host views.
    """
    for tensor, view in pairs:
        _follow(tensor, view)
    owners = {id(view): tensor for tensor, view in pairs}
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor, _ in pairs}

    def up(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or device.type != "npu":
            return value
        if id(value) in owners:
            return owners[id(value)]
        owner = storages.get(value.untyped_storage().data_ptr())
        if owner is None or value.numel() == 0:
            return _to_device(value, device)
        return _alias(value, owner)

    return tree_map(up, result)


def _follow(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Give an output that the host has resized its new shape, and bytes of its own."""
    if view.shape == tensor.shape and view.untyped_storage().nbytes() <= tensor.untyped_storage().nbytes():
        return
    tensor.resize_(view.shape)
    _host_view(tensor).copy_(view)


def _alias(value: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """Return a device tensor over the owner's storage, as a host tensor lies over the same bytes."""
    empty = torch.empty(0, dtype=value.dtype, device=owner.device)
    return empty.set_(owner.untyped_storage(), value.storage_offset(), value.shape, value.stride())


@contextlib.contextmanager
def _drawing(device: torch.device, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Seed the host's generator from the device's, and move that on, as a random operator does.

    Yields the arguments without the generator.
    """
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Generator)]
    generator = given[0] if given else _default_generator(device)
    state = generator.get_state()
    words = state.view(torch.int64)  # seed and offset
    seed, offset = words.tolist()
    with _host_generator:
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed((seed * 6364136223846793005 + offset) % (1 << 63))
        try:
            yield tree_map(_without_generator, (args, kwargs))
        finally:
            torch.default_generator.set_state(before)
    words[1] = offset + _DRAWS_PER_CALL
    generator.set_state(state)


def _without_generator(value: Any) -> Any:
    return None if isinstance(value, torch.Generator) else value


def _default_generator(device: torch.device) -> torch.Generator:
    generator: torch.Generator = torch.npu.default_generators[device.index]
    return generator


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Let a reference use autograd, which the dispatcher has switched off where kernels run."""
    include = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradCPU", "AutogradOther", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(include, excluded), torch.no_grad():
        yield


def _check_results(op: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Compare shapes and dtypes of a reference's results with torch-npu's own Meta kernel."""
    if op.namespace != "npu" or not _has_kernel(op.name(), "Meta"):
        return
    expected = op(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
    for i, (wanted, found) in enumerate(zip(tree_leaves(expected), tree_leaves(result), strict=True)):
        if wanted is not None and _described(wanted) != _described(found):
            raise AssertionError(
                f"{op.name()}, result {i}: the reference returns {_described(found)}, "
                f"torch-npu {_described(wanted)}"
            )


def _described(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)


def _to_meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if _on_device(value) else value


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def _host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor over the same bytes."""
    storage = tensor.untyped_storage()
    with torch.no_grad():
        if storage.nbytes() == 0:
            return torch.empty(0, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
        data = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
        raw = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(raw, tensor.storage_offset(), tensor.shape, tensor.stride())


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device, with the same strides, also where elements share an address."""
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        ctypes.memmove(new.data_ptr(), tensor.data_ptr(), span * tensor.element_size())
    return new
