"""One GPU of a process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from anygauge_cuda.allocator import shareable
from anygauge_cuda.env import GPUS
from anygauge_cuda.graphs import capture_graph
from anygauge_cuda.nvml import Meters, find_gpu
from anygauge_hooks.types import CaptureGraph

__all__ = ["CudaDevice"]


class CudaDevice:
    """A GPU, made the current device of the process."""

    type = "cuda"
    capture_graph: CaptureGraph | None = staticmethod(capture_graph)

    def __init__(self, index: int = 0) -> None:
        GPUS.require(index, torch.cuda.device_count(), os.environ)
        self.index = index
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(index)
        self._meters: Meters | None = None

    def seed(self, seed: int) -> None:
        """Seed the host's generator and those of every GPU."""
        torch.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        """Return the state of the GPU's generator, a uint8 host tensor."""
        return torch.cuda.get_rng_state(self.index)

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what :meth:`get_rng_state` returned."""
        torch.cuda.set_rng_state(state, self.index)

    def synchronize(self) -> None:
        """Wait for every stream of the GPU."""
        torch.cuda.synchronize(self.index)

    def memory(self) -> Mapping[str, int]:
        """Return byte counts: ``allocated`` and ``reserved`` by this process, ``free`` and ``total``."""
        free, total = torch.cuda.mem_get_info(self.index)
        return {
            "allocated": torch.cuda.memory_allocated(self.index),
            "reserved": torch.cuda.memory_reserved(self.index),
            "free": free,
            "total": total,
        }

    def peak_memory(self, *, reset: bool = False) -> int | None:
        """Return the most bytes that torch had allocated on the GPU at once since the last reset."""
        peak = torch.cuda.max_memory_allocated(self.index)
        if reset:
            torch.cuda.reset_peak_memory_stats(self.index)
        return peak

    def empty_cache(self) -> None:
        """Return cached blocks to the driver, also those that other processes no longer use."""
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()

    def shareable(self) -> AbstractContextManager[None]:
        """Inside it, torch takes memory that any process of the user can map."""
        return shareable()

    def meters(self) -> Mapping[str, float]:
        """Return NVML's meters of the GPU since the last call; empty without ``nvidia-ml-py``."""
        if self._meters is None:
            gpu = find_gpu(str(torch.cuda.get_device_properties(self.index).uuid))
            self._meters = Meters(*gpu) if gpu else None
        return self._meters.read() if self._meters else {}
