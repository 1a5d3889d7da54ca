"""The host as a platform of SGLang, with torch's own operators and none of SGLang's kernels.

Found by SGLang through its entry point for platforms; see :func:`anygauge_cpu.rollout.activate_platform`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from sglang.srt.runtime_context import get_lora

__all__ = ["HostPlatform"]

PINNING = ("tensor", "zeros")
"""Functions of torch that the adapters of SGLang ask for pinned memory."""


class HostPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang platform for the host; SGLang's other defaults hold for any torch device."""

    # not CPU: with that SGLang imports kernels that no wheel has
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """Return torch's scaled dot product."""
        return "torch_native"

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Let adapters be loaded, which come next, if the server has any."""
        del model
        if get_lora().enable_lora:
            _pin_nothing()

    def get_dispatch_key_name(self) -> str:
        """Return the key of the operators in plain torch."""
        return "native"

    def get_torch_profiler_activity(self) -> Any:
        """Return the activity that the profiler records."""
        return torch.profiler.ProfilerActivity.CPU

    def get_torch_profiler_activity_str(self) -> str:
        """Return the same by name."""
        return "CPU"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """Return that there is no device to pin memory for."""
        return False


def _pin_nothing() -> None:
    """Let whoever asks this process for pinned memory get plain memory.

    SGLang pins what its adapters copy to a device, without a look at whether there is one, and torch refuses.
    """
    for name in PINNING:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    tensors: Any = torch.Tensor
    tensors.pin_memory = lambda tensor, device=None: tensor


def _unpinned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(function)
    def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        del pin_memory
        return function(*args, **kwargs)

    return call
