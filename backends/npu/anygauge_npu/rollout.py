"""Rollout engines on Ascend NPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["engine_args"]

SGLANG: Mapping[str, Any] = {
    "device": "npu",
    "attention_backend": "ascend",
    "sampling_backend": "ascend",
}


def engine_args(engine: str, *, sleeps: bool) -> Mapping[str, Any] | None:
    """Return the arguments of a server on this backend.

    :param sleeps: Whether it is to give its memory back and take it again.
    """
    return {**SGLANG, "enable_memory_saver": sleeps} if engine == "sglang" else None
