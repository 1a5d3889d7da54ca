"""From the Hugging Face config of GLM-4.1V to Megatron's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.models import text_config
from anygauge_models.architecture import model_options as options_of
from anygauge_models.glm4 import DENSE
from anygauge_models.rope import turning_part

__all__ = [
    "decoder",
    "flops_per_token",
    "forbidden",
    "model_options",
    "rotary_dim",
    "token_of",
    "transformer_config",
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


def rotary_dim(hf: Mapping[str, Any]) -> int:
    """Return how many dimensions of a head turn with the position; all of them by default."""
    text = decoder(hf)
    return turning_part(text, text["head_dim"], 1.0)


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    return DENSE.transformer_config(decoder(hf))


def model_options(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return vocabulary size, longest sequence, and whether the embeddings are tied."""
    return options_of(decoder(hf))


def flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Return the floating-point operations of a forward pass per token, causal attention counted once."""
    return DENSE.flops_per_token(decoder(hf), sequence_length)


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
