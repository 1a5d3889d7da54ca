"""Run torch-npu's operators on the host, on the bytes of the simulated device.

Everything else is the wheel's own: allocator, streams, events, autograd, random states, ProcessGroupHCCL. It
shows device plumbing. It never shows an Ascend's numerics, speed or ordering.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["install"]

_NATIVE = frozenset(
    {
        "_pin_memory",
        "_reshape_alias",
        "_resize_",
        "_unsafe_view",
        "alias",
        "as_strided",
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

_libraries: list[torch.library.Library] = []


def install() -> int:
    """Put a host kernel in the place of every aten kernel that torch-npu registers.

    :returns: The number of kernels.
    """
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)  # a library that is collected takes its kernels with it
    count = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*verriding a previously registered kernel.*")
        for name in torch._C._dispatch_get_all_op_names():
            base, _, overload = name.removeprefix("aten::").partition(".")
            if not name.startswith("aten::") or not _NATIVE.isdisjoint({base, f"{base}.{overload}"}):
                continue
            if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1"):
                continue
            packet = getattr(torch.ops.aten, base, None)
            op = getattr(packet, overload or "default", None)
            if op is not None:
                library.impl(op, functools.partial(_run, op), "PrivateUse1", allow_override=True)
                count += 1
    return count


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator on host views of its arguments, and return its results on the device."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise NotImplementedError(f"{op.name()}: random operators are not simulated")
    flat, _ = tree_flatten((args, kwargs))
    views = {id(tensor): _host_view(tensor) for tensor in flat if _on_device(tensor)}
    owners = {id(views[id(tensor)]): tensor for tensor in flat if _on_device(tensor)}
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else torch.device("npu", 0)

    def down(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return views.get(id(value), value)

    def up(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or device.type != "npu":
            return value
        return owners[id(value)] if id(value) in owners else _to_device(value)

    result = op(*tree_map(down, args), **tree_map(down, kwargs))
    return tree_map(up, result)


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def _host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor over the same bytes."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or storage.data_ptr() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    data = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
    with torch.no_grad():
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(raw, tensor.storage_offset(), tensor.shape, tensor.stride())


def _to_device(tensor: torch.Tensor) -> torch.Tensor:
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="npu")
    if tensor.numel():
        _host_view(new).copy_(tensor)
    return new
