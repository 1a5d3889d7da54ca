"""Rollout engines on Ascend NPUs.

SGLang has an NPU platform of its own, which it finds by ``torch.npu``: ``prepare_worker`` loads torch-npu in
every process of a server, so nothing is registered with SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["INSTALLS", "engine_args"]

INSTALLS: Mapping[str, str] = {
    "sglang": "from source with its pyproject_npu.toml, as docker/Dockerfile.npu does"
}
"""The wheel of SGLang asks for a torch that no torch-npu fits."""

SGLANG: Mapping[str, Any] = {
    "device": "npu",
    "attention_backend": "ascend",
    "mm_attention_backend": "ascend_attn",
    # samples from logits and tells log-probs of the whole vocabulary at the temperature
    "sampling_backend": "ascend",
}


def engine_args(engine: str, *, sleeps: bool) -> Mapping[str, Any] | None:
    """Return the arguments of a server on this backend.

    :param sleeps: Whether it is to give its memory back and take it again.
    """
    return {**SGLANG, "enable_memory_saver": sleeps} if engine == "sglang" else None
