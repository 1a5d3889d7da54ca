"""From Qwen3-VL's Hugging Face config to Megatron's. The decoder is Qwen3's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anygauge_hooks.media import MediaKind
from anygauge_models import qwen3

__all__ = ["DENSE", "forbidden", "placeholders"]

DENSE = replace(qwen3.DENSE, family="qwen3_vl")


def placeholders(hf: Mapping[str, Any]) -> dict[MediaKind, int]:
    """Return the tokens that hold the places of features."""
    return {"image": hf.get("image_token_id", 151_655), "video": hf.get("video_token_id", 151_656)}


def forbidden(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that hold places."""
    return tuple(placeholders(hf).values())
