"""Shared-memory tensors, which another process of the host maps instead of copying."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

__all__ = ["serialized", "shared_memory"]

_DEVICE = 6
"""Which argument of what rebuilds an accelerator's tensor is the device's index."""
_strategy = threading.Lock()


def shared_memory(size: int) -> Tensor:
    """Return named shared memory, which any process of the user can map, uint8."""
    with _by_name():
        # share_memory_() would copy memory that nobody has written: twice the size, for as long as it takes
        storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=torch.uint8).set_(storage)


def serialized(value: Any) -> str:
    """Pickle an object with references to the memory of its tensors, in base64.

    Memory of the host is referred to by name: a file descriptor, torch's default, can only be had from a
    relative, and a server that fails to get it ends. An accelerator's memory is referred to by the handle
    that torch makes and by the unique id of the device, since processes may number devices differently.
    """
    stream = io.BytesIO()
    with _by_name():
        _Pickler(stream).dump(value)
    return base64.b64encode(stream.getvalue()).decode()


@contextmanager
def _by_name() -> Iterator[None]:
    """Let torch share host memory by name, in the whole process, for as long as the block runs."""
    torch_sharing: Any = torch.multiprocessing  # untyped
    with _strategy:
        before = torch_sharing.get_sharing_strategy()
        torch_sharing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            torch_sharing.set_sharing_strategy(before)


class _Pickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return NotImplemented
        reduce: Callable[..., Any] = reductions.reduce_tensor
        rebuild, arguments = reduce(value)
        properties = torch.get_device_module(value.device).get_device_properties(value.device)
        unique = getattr(properties, "uuid", None)
        if unique is None:
            return rebuild, arguments
        return rebuild, (*arguments[:_DEVICE], str(unique), *arguments[_DEVICE + 1 :])
