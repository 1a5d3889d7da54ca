"""From the Hugging Face config of GLM-4.1V to Megatron's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.models import text_config

__all__ = [
    "decoder",
    "forbidden",
    "token_of",
    "vision_of",
]

_VISION = {
    "depth": 24,
    "hidden_size": 1536,
    "intermediate_size": 13_696,
    "out_hidden_size": 4096,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_TOKENS = {"image": 151_343, "video": 151_344}
_TOKENS_OF_MIXTURES = {"image": 151_363, "video": 151_364}
"""Placeholder tokens of the published models."""


def decoder(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the decoder as one of GLM-4: its heads divide the hidden size and have biases."""
    text = text_config(hf)
    return {
        **text,
        "attention_bias": True,
        "head_dim": text["hidden_size"] // text["num_attention_heads"],
    }


def vision_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the tower, with the defaults of ``transformers``."""
    return {**_VISION, **hf["vision_config"]}


def token_of(hf: Mapping[str, Any], kind: str) -> int:
    """Return the token that the template writes for a kind; those of frames are images'."""
    tokens = _TOKENS_OF_MIXTURES if hf["model_type"] == "glm4v_moe" else _TOKENS
    return int(hf.get(f"{kind}_token_id", tokens[kind]))


def forbidden(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that hold places."""
    return tuple(token_of(hf, kind) for kind in _TOKENS)
