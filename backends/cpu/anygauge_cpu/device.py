"""The host as a device, and what stands for an accelerator's functions on it."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from anygauge_hooks.megatron import ScopeMap
from anygauge_hooks.resources import read_memory
from anygauge_hooks.types import Device

__all__ = ["CpuDevice", "HostEvent", "HostStream"]

CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Value that resets the peak of the resident memory to its current size."""


class CpuDevice(Device):
    """The host: one device without queues, whose memory is that of the process."""

    type = "cpu"

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.torch_device = torch.device("cpu")
        self.scope_map: ScopeMap | None = host_scope_map()

    def seed(self, seed: int) -> None:
        """Seed the host's generator."""
        torch.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        """Return the state of the host's generator, uint8."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what :meth:`get_rng_state` returned."""
        torch.set_rng_state(state)

    def synchronize(self) -> None:
        """Return at once: nothing is ever queued."""

    def memory(self) -> Mapping[str, int]:
        """Return byte counts, within the limits of a container.

        ``allocated`` is the resident memory of this process, and others count in ``free``.
        """
        host = read_memory()
        resident = psutil.Process().memory_info().rss
        return {"allocated": resident, "free": host.available, "total": host.total}

    def peak_memory(self, *, reset: bool = False) -> int | None:
        """Return the largest resident memory of this process since the last reset, in bytes.

        Where the kernel cannot start anew, it is that since the process started.
        """
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if reset:
            with contextlib.suppress(OSError):
                CLEAR_REFS.write_text(RESET_PEAK)
        return peak


class HostStream:
    """A queue whose work is done by the time it is queued."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        del device, priority

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return that all work is done."""
        return True

    def wait_stream(self, stream: HostStream) -> None:
        """Return at once."""

    def wait_event(self, event: HostEvent) -> None:
        """Return at once."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Return an event that has happened."""
        return event or HostEvent()


class HostEvent(torch.cpu.Event):
    """A point in a :class:`HostStream`. It cannot be timed."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        del enable_timing, blocking, interprocess


def host_scope_map() -> ScopeMap:
    """Return the host's version of each function that Megatron calls on an accelerator."""
    stream = HostStream()
    return ScopeMap(
        device_type="cpu",
        functions={
            "Event": HostEvent,
            "Stream": HostStream,
            "current_device": lambda: "cpu",  # used as ``device=``: an index would mean an accelerator
            "current_stream": lambda device=None: stream,
            "default_stream": lambda device=None: stream,
            "device_count": lambda: 1,
            "empty_cache": _nothing,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "is_available": lambda: False,
            # torch.manual_seed itself calls manual_seed_all
            "manual_seed": torch.default_generator.manual_seed,
            "manual_seed_all": torch.default_generator.manual_seed,
            "set_device": _nothing,
            "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
            "set_stream": _nothing,
            "stream": contextlib.nullcontext,
            "synchronize": _nothing,
        },
        tensor_types={
            "fp32": ("torch.FloatTensor",),
            "fp16": ("torch.HalfTensor",),
            "bf16": ("torch.BFloat16Tensor",),
        },
        has_index=False,
        has_pinned_memory=False,
        is_accelerator=False,
    )


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand for a function that has nothing to do on a host."""
