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
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
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

_COPIES = frozenset({"_copy_from", "_copy_from_and_resize", "_foreach_copy_", "_to_copy", "copy_"})
"""Operators that take tensors of any devices."""

_ASSIGNMENTS = frozenset({"_index_put_impl_", "index_put", "index_put_"})
"""Operators that take indices of any device, and bring them to the tensor's."""

_HOST_KEYS = (
    "CPU",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)
_DRAWS_PER_CALL = 4
"""How far a random operator moves the generator's offset; real ones move it by what they draw."""

_WRONG_META = {("npu::npu_fusion_attention", 0)}
"""Results that torch-npu 2.10 gives the width of queries in its Meta kernel; devices use the values'."""

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
        return _install("aten", _host_kernel) + _install("npu", lambda name, op: None) + _install_composites()


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


def _install_composites() -> int:
    """Make of simple operators what torch-npu makes by kernels of the device, past the dispatcher."""
    for name, function in _COMPOSITES.items():
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            _libraries[0].impl(name, function, key, allow_override=True)
    return len(_COMPOSITES)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # which the operator below would add as 1
        added = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = added.masked_fill_(attn_mask.logical_not(), float("-inf"))
    operator = torch.ops.aten._scaled_dot_product_attention_math
    attended: torch.Tensor = operator(query, key, value, attn_mask, *args, **kwargs)[0]
    return attended


def _one_hot(x: torch.Tensor, classes: int = -1) -> torch.Tensor:
    count = int(x.max()) + 1 if classes == -1 else classes
    return (x.unsqueeze(-1) == torch.arange(count, device=x.device)).long()


_COMPOSITES = {"scaled_dot_product_attention": _attention, "one_hot": _one_hot}


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
    given: list[torch.Tensor] = []
    views: list[torch.Tensor] = []
    storages: dict[int, torch.UntypedStorage] = {}

    def down(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            given.append(value)
            views.append(_host_view(value, storages) if value.device.type == "npu" else value)
            return views[-1]
        if isinstance(value, torch.device) and value.type == "npu":
            return torch.device("cpu")
        return value

    host_args, host_kwargs = _mapped(down, args), {name: _mapped(down, each) for name, each in kwargs.items()}
    if len({tensor.device for tensor in given}) > 1:
        _check_devices(op, args, kwargs)
    name = op.overloadpacket.__name__
    device = args[0].device if name in _ASSIGNMENTS else _target(kwargs.get("device"), given)
    if host_kwargs.get("pin_memory"):
        host_kwargs["pin_memory"] = False
    with contextlib.ExitStack() as stack:
        if torch.Tag.nondeterministic_seeded in op.tags:
            stack.enter_context(_drawing(device, (*args, *kwargs.values())))
            host_args = _mapped(_without_generator, host_args)
            host_kwargs = {name: _without_generator(each) for name, each in host_kwargs.items()}
        if function is not op:
            stack.enter_context(_autograd())
        result = function(*host_args, **host_kwargs)
    if function is not op:
        _check_results(op, args, kwargs, result)
    return _returned(result, list(zip(given, views, strict=True)), device)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to a value, or to what a list or tuple of an operator's arguments or results holds."""
    if type(value) in (list, tuple):
        return type(value)([_mapped(function, each) for each in value])
    return function(value)


def _check_devices(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse tensors of several devices, as kernels of a device do and those of the host cannot.

    Measured of CUDA, torch 2.11: a 0-dim tensor of the CPU goes with a device's where it is only read.
    """
    name = op.overloadpacket.__name__
    if name in _COPIES:
        return
    schema = op._schema.arguments
    written = {each.name for each in schema if each.alias_info is not None and each.alias_info.is_write}
    values = dict(zip((each.name for each in schema), args, strict=False)) | kwargs
    if name == "index" or name in _ASSIGNMENTS:
        indices = values.pop("indices")
        if name == "index":
            _check_indices(op, values["self"].device, indices)
    for row in _rows(values) if name.startswith("_foreach_") else [values]:
        devices = {
            str(each.device): None
            for key, value in row.items()
            for each in tree_leaves(value)
            if isinstance(each, torch.Tensor) and (key in written or not _is_host_number(each))
        }
        if len(devices) > 1:
            names = " and ".join(devices)
            raise RuntimeError(
                f"{op.name()}: expected all tensors to be on the same device, but found {names}!"
            )


def _check_indices(op: Any, device: torch.device, indices: Sequence[torch.Tensor | None]) -> None:
    for index in indices:
        if index is not None and index.device.type != "cpu" and index.device != device:
            raise RuntimeError(
                f"{op.name()}: indices must be on the CPU or on the same device as the tensor, {device}, "
                f"but are on {index.device}!"
            )


def _rows(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments for each element of the lists: each is an operator of its own."""
    count = min(len(value) for value in values.values() if isinstance(value, list | tuple))
    for i in range(count):
        yield {name: value[i] if isinstance(value, list | tuple) else value for name, value in values.items()}


def _is_host_number(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and tensor.device.type == "cpu"


def _target(asked: Any, given: list[torch.Tensor]) -> torch.device:
    """Return where results go: the device that is asked for, that of the arguments, or the current one."""
    places = [tensor.device for tensor in given if tensor.device.type == "npu"]
    device = torch.device(asked) if asked is not None else places[0] if places else torch.device("npu")
    if str(device) == "npu":
        return torch.device("npu", torch.accelerator.current_device_index())
    return device


def _returned(result: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> Any:
    """Return what an operator returns, with device tensors in the place of host tensors.

    :param pairs: The tensors that it was given, with their host views.
    """
    for tensor, view in pairs:
        if view is not tensor:
            _follow(tensor, view)
    owners = {id(view): tensor for tensor, view in pairs}
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor, _ in pairs}

    def up(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or device.type != "npu":
            return value
        if id(value) in owners:
            return owners[id(value)]
        owner = storages.get(value.untyped_storage().data_ptr())
        if owner is None or value.numel() == 0 or owner.device.type != "npu":
            return _to_device(value, device)
        return _alias(value, owner)

    return _mapped(up, result)


def _follow(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Give an output that the host has resized its new shape, and bytes of its own."""
    if view.shape != tensor.shape or view.untyped_storage().nbytes() > tensor.untyped_storage().nbytes():
        tensor.resize_(view.shape)
        _host_view(tensor, {}).copy_(view)


def _alias(value: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """Return a device tensor over the owner's storage, as a host tensor lies over the same bytes."""
    empty = torch.empty(0, dtype=value.dtype, device=owner.device)
    empty.set_(owner.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    return _with_lazy_signs(empty, value)


@contextlib.contextmanager
def _drawing(device: torch.device, arguments: Sequence[Any]) -> Iterator[None]:
    """Seed the host's generator from the device's, and move that on, as a random operator does."""
    given = [value for value in arguments if isinstance(value, torch.Generator)]
    generator = given[0] if given else _default_generator(device)
    state = generator.get_state()
    words = state.view(torch.int64)  # seed and offset
    seed, offset = words.tolist()
    with _host_generator:
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed((seed * 6364136223846793005 + offset) % (1 << 63))
        try:
            yield
        finally:
            torch.default_generator.set_state(before)
    words[1] = offset + _DRAWS_PER_CALL
    generator.set_state(state)


def _without_generator(value: Any) -> Any:
    return None if isinstance(value, torch.Generator) else value


def _default_generator(device: torch.device) -> torch.Generator:
    generators: Sequence[torch.Generator] = importlib.import_module("torch_npu").npu.default_generators
    return generators[device.index]


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
    for i, (wanted, actual) in enumerate(zip(tree_leaves(expected), tree_leaves(result), strict=True)):
        if (op.name(), i) in _WRONG_META and version("torch-npu").startswith("2.10."):
            continue
        if wanted is not None and _described(wanted) != _described(actual):
            raise AssertionError(
                f"{op.name()}, result {i}: the reference returns {_described(actual)}, "
                f"torch-npu {_described(wanted)}"
            )


def _described(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)


def _to_meta(value: Any) -> Any:
    is_tensor = isinstance(value, torch.Tensor)
    return torch.empty_like(value, device="meta") if is_tensor and value.device.type == "npu" else value


def _host_view(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return a host tensor over the same bytes.

    :param storages: Host storages by address, so that tensors that overlap do so for the host as well.
    """
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    with torch.no_grad():
        empty = torch.empty(0, dtype=tensor.dtype)
        if storage.nbytes() == 0:
            return empty.as_strided(tensor.shape, tensor.stride())
        if address not in storages:
            data = (ctypes.c_uint8 * storage.nbytes()).from_address(address)
            storages[address] = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
        empty.set_(storages[address], tensor.storage_offset(), tensor.shape, tensor.stride())
        return _with_lazy_signs(empty, tensor)


def _with_lazy_signs(new: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor over a copy of another's bytes as conjugated or negated where that is put off."""
    torch._C._set_conj(new, tensor.is_conj())
    torch._C._set_neg(new, tensor.is_neg())
    return new


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device, with the same strides, also where elements share an address."""
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        ctypes.memmove(new.data_ptr(), tensor.data_ptr(), span * tensor.element_size())
    return _with_lazy_signs(new, tensor)
