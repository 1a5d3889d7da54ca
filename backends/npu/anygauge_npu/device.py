"""One NPU of a process, and what stands for CUDA's functions on it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anygauge_hooks.megatron import REDIRECTED, ScopeMap
from anygauge_hooks.types import Device
from anygauge_npu import mindspeed
from anygauge_npu.env import NPUS

__all__ = ["NpuDevice", "npu_scope_map", "vendor_module"]

TENSOR_TYPES: Mapping[str, Sequence[str]] = {
    "fp32": ("torch.FloatTensor", "torch.npu.FloatTensor"),
    "fp16": ("torch.HalfTensor", "torch.npu.HalfTensor"),
    "bf16": ("torch.BFloat16Tensor", "torch.npu.BFloat16Tensor"),
}


class NpuDevice(Device):
    """An NPU, made the current device of the process; no meter of it is read yet."""

    type = "npu"

    def __init__(self, index: int = 0) -> None:
        self._npu = vendor_module()
        NPUS.require(index, self._npu.device_count(), os.environ)
        self.index = index
        self.torch_device = torch.device("npu", index)
        self._npu.set_device(index)
        _choose_operators(self._npu)
        # a library may have made the literal names mean the NPU in the whole process
        self.scope_map: ScopeMap | None = None if mindspeed.means_the_npu() else npu_scope_map()

    def seed(self, seed: int) -> None:
        """Seed the host's generator and those of every NPU."""
        torch.manual_seed(seed)
        self._npu.manual_seed_all(seed)

    def get_rng_state(self) -> Any:
        """Return the state of the NPU's generator, a uint8 host tensor."""
        return self._npu.get_rng_state(self.index)

    def set_rng_state(self, state: Any) -> None:
        """Restore what :meth:`get_rng_state` returned."""
        self._npu.set_rng_state(state, self.index)

    def synchronize(self) -> None:
        """Wait for every stream of the NPU."""
        self._npu.synchronize(self.index)

    def memory(self) -> Mapping[str, int]:
        """Return byte counts: ``allocated`` and ``reserved`` by this process, ``free`` and ``total``."""
        free, total = self._npu.mem_get_info(self.index)
        return {
            "allocated": self._npu.memory_allocated(self.index),
            "reserved": self._npu.memory_reserved(self.index),
            "free": free,
            "total": total,
        }

    def peak_memory(self, *, reset: bool = False) -> int | None:
        """Return the most bytes that torch had allocated on the NPU at once since the last reset."""
        peak: int = self._npu.max_memory_allocated(self.index)
        if reset:
            self._npu.reset_peak_memory_stats(self.index)
        return peak

    def empty_cache(self) -> None:
        """Return cached blocks to the driver, also those of pinned host memory and of dead processes."""
        self._npu.ipc_collect()
        self._npu.empty_cache()
        self._npu.host_empty_cache()


def _choose_operators(npu: Any) -> None:
    """Choose, for this process, how torch-npu runs what it could run in several ways."""
    # kernels compiled ahead of time: compiling on first use costs minutes and refuses many operators
    npu.set_compile_mode(jit_compile=False)
    # tensors are laid out as torch says: whoever reads a weight's bytes finds them there
    npu.config.allow_internal_format = False
    # float32 is float32: with HF32, which convolutions have by default, it keeps 11 bits of the mantissa
    npu.matmul.allow_hf32 = npu.conv.allow_hf32 = False


def vendor_module() -> Any:
    """Return ``torch.npu``, which importing torch-npu creates."""
    return importlib.import_module("torch_npu").npu


def npu_scope_map() -> ScopeMap:
    """Return torch.npu's version of each function that Megatron calls on a GPU."""
    npu = vendor_module()
    functions: dict[str, Any] = {name: getattr(npu, name) for name in REDIRECTED}
    # the device argument may say CUDA; a worker has one NPU, the current one
    functions["get_rng_state"] = lambda device=None: npu.get_rng_state()
    functions["set_rng_state"] = lambda new_state, device=None: npu.set_rng_state(new_state)
    return ScopeMap(device_type="npu", functions=functions, tensor_types=TENSOR_TYPES)
