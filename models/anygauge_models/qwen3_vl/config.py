"""From Qwen3-VL's Hugging Face config to Megatron's. The decoder is Qwen3's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.media import MediaKind
from anygauge_models.architecture import decoder_config, model_options, refuse_variants
from anygauge_models.qwen3 import attention_of, flops_per_token, head_dim, refused

__all__ = [
    "attention_of",
    "flops_per_token",
    "forbidden",
    "head_dim",
    "model_options",
    "placeholders",
    "transformer_config",
]


def placeholders(hf: Mapping[str, Any]) -> dict[MediaKind, int]:
    """Return the tokens that hold the places of features."""
    return {"image": hf.get("image_token_id", 151_655), "video": hf.get("video_token_id", 151_656)}


def forbidden(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that hold places."""
    return tuple(placeholders(hf).values())


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    refuse_variants(hf, "qwen3_vl", refused(hf))
    return decoder_config(hf, **attention_of(hf), qk_layernorm=True)
