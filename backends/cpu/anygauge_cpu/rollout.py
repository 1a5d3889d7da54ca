"""Rollout engines on a host without an accelerator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

__all__ = ["INSTALLS", "PLATFORM", "PLATFORM_ENV", "activate_platform", "engine_args"]

PLATFORM = "anygauge_cpu"
"""Entry point of the group ``sglang.srt.platforms``."""
ASKED = "ANYGAUGE_SGLANG_PLATFORM"
"""Environment variable: who asks for this platform. Without it SGLang never hears of it."""
PLATFORM_ENV: Mapping[str, str] = {ASKED: PLATFORM, "SGLANG_PLATFORM": PLATFORM}
"""Environment of the server processes that our launcher starts."""
INSTALLS: Mapping[str, str] = {
    "sglang": "in a clone of anygauge, pip install --no-deps -r requirements/sglang-cpu.txt"
}
"""Its own requirements are those of a GPU, a torch that fits them included."""

SGLANG: Mapping[str, Any] = {
    "device": "cpu",
    # what has no kernels of its own for the host
    "attention_backend": "torch_native",
    "mm_attention_backend": "sdpa",
    "sampling_backend": "pytorch",
    "lora_backend": "torch_native",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
}


def engine_args(engine: str, max_tokens: int) -> Mapping[str, Any] | None:
    """Return the arguments of a server on the host.

    :param max_tokens: Tokens of its cache, which is memory of the host: SGLang would take most of that.
    """
    return {**SGLANG, "max_total_tokens": max_tokens} if engine == "sglang" else None


def activate_platform() -> str | None:
    """Name the platform, if our launcher asked for it; SGLang calls this in each of its processes."""
    if os.environ.get(ASKED) != PLATFORM:
        return None
    return "anygauge_cpu.sglang_platform.HostPlatform"
