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
    "tiny",
    "tiny_text",
    "tiny_tokens",
    "tiny_vision",
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


def tiny() -> dict[str, Any]:
    """Return a config that trains on a laptop in seconds; both layers of its decoder get levels."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {"model_type": "qwen3_vl_text", "intermediate_size": 128, **tiny_text()},
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "deepstack_visual_indexes": [0, 1],
            **tiny_vision(),
        },
        "tie_word_embeddings": True,
        **tiny_tokens(),
    }


def tiny_tokens() -> dict[str, int]:
    """Return the special tokens of the tiny configs, the last of their vocabularies."""
    return {
        "image_token_id": 60,
        "video_token_id": 61,
        "vision_start_token_id": 62,
        "vision_end_token_id": 63,
    }


def tiny_text() -> dict[str, Any]:
    """Return what the decoders of the tiny dense model and of the tiny mixture of experts have in common."""
    return {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "max_position_embeddings": 512,
    }


def tiny_vision() -> dict[str, Any]:
    """Return a tower of two layers with patches of 8x8 pixels, four of which are one feature."""
    return {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
    }
