"""Device functions that ``torch.accelerator`` lacks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from anygauge_hooks.errors import OutOfMemoryError
from anygauge_hooks.types import Device

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "DETERMINISTIC_ENV",
    "LateDevice",
    "is_out_of_memory",
    "memory_phase",
    "on_device",
    "peak_memory_by_phase",
    "seed_everything",
    "set_deterministic",
    "take_peak_memory",
]

DETERMINISTIC_ENV: Mapping[str, str] = {"PYTHONHASHSEED": "0"}
"""Environment of the workers of a deterministic run on any backend: it fixes the iteration order of sets of
strings."""
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)
"""How allocators that raise a bare ``RuntimeError`` say it, the host's among them."""
MAX_REASON = 400
GIB = 2**30

_peaks: dict[str, int] = {}
"""Peak bytes allocated in this process, by phase."""
_recent: dict[str, int] = {}
"""The same since :func:`take_peak_memory` was last called."""


class LateDevice:
    """A :class:`~anygauge_hooks.types.Device` that is made when something of it is first asked for."""

    def __init__(self, make: Callable[[], Device]) -> None:
        self._make = make
        self._device: Device | None = None

    def __getattr__(self, name: str) -> Any:
        if self._device is None:
            self._device = self._make()
        return getattr(self._device, name)


def seed_everything(device: Device, seed: int) -> None:
    """Seed Python, NumPy, torch on the host, and torch on the device.

    Megatron's own seeding reaches the device's generator alone. Weights are initialized on the host, and
    data-parallel ranks that were not seeded there start from different weights without a word.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    device.seed(seed)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device asynchronously.

    Memory that is not pinned is copied when all that the device has to do before is done: between forward
    and backward it would stand still for as long as the host takes for what comes next.
    """
    if device.type == tensor.device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def set_deterministic() -> None:
    """Make torch use only deterministic algorithms in this process, on every device.

    An operator that has none raises :class:`RuntimeError` when it is called. Torch then also fills memory
    that would be left uninitialized. What a backend needs beside it comes through ``worker_env``.
    """
    import torch

    torch.use_deterministic_algorithms(True)
    torch.backends.mkldnn.deterministic = True  # type: ignore[assignment]  # typed as its descriptor


# -------------------------------------------------------------------------
# Memory
# -------------------------------------------------------------------------


@contextmanager
def memory_phase(device: Device, phase: str) -> Iterator[None]:
    """Record the peak memory of a phase, name it in a profile, and explain an allocation that fails in it.

    :param phase: ``load``, ``generate``, ``log_probs``, ``forward_backward``, ``optimizer``, ``weight_sync``.
    :raises OutOfMemoryError: An allocation failed, on the device or on the host.
    """
    import torch

    device.peak_memory(reset=True)
    try:
        with torch.profiler.record_function(phase):
            yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        _record(device, phase)
        raise _explained(device, phase, error) from error
    finally:
        _record(device, phase)


def peak_memory_by_phase() -> Mapping[str, int]:
    """Return the most bytes that this process had allocated at once, by phase."""
    return dict(_peaks)


def take_peak_memory() -> int | None:
    """Return the most bytes allocated at once in the phases since the last call; ``None`` if not known."""
    peak = max(_recent.values(), default=None)
    _recent.clear()
    return peak


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception is a failed allocation, on any device."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None


def _record(device: Device, phase: str) -> None:
    peak = device.peak_memory()
    if peak is not None:
        _peaks[phase] = max(peak, _peaks.get(phase, 0))
        _recent[phase] = max(peak, _recent.get(phase, 0))


def _explained(device: Device, phase: str, error: BaseException) -> OutOfMemoryError:
    reason = " ".join(str(error).split())[:MAX_REASON] or "an allocation on the host failed"
    peaks = ", ".join(f"{name} {size / GIB:.2f}" for name, size in _peaks.items()) or "unknown"
    memory = ", ".join(f"{size / GIB:.2f} {name}" for name, size in device.memory().items()) or "unknown"
    return OutOfMemoryError(
        f"Out of memory in phase {phase}: {reason}\n"
        f"  Peak of each phase so far in GiB: {peaks}.\n"
        f"  Memory of {device.torch_device} in GiB: {memory}.",
        phase=phase,
    )
