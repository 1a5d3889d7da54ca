"""From the Hugging Face config of GLM-4.5V to Megatron's. The decoder is GLM-4.5's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.models import text_config
from anygauge_models.glm4_moe import config as glm4_moe
from anygauge_models.glm4v.config import forbidden, tiny_around

__all__ = [
    "decoder",
    "expert_layers",
    "flops_per_token",
    "forbidden",
    "model_options",
    "tiny",
    "transformer_config",
]


def decoder(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the decoder as one of GLM-4.5 with biases, without norms of queries and keys."""
    return {"attention_bias": True, **text_config(hf), "use_qk_norm": False}


def expert_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers whose MLP is a mixture of experts: all but the first ones."""
    return glm4_moe.expert_layers(decoder(hf))


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    return glm4_moe.transformer_config(decoder(hf))


def model_options(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return vocabulary size, longest sequence, and whether the embeddings are tied."""
    return glm4_moe.model_options(decoder(hf))


def flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Return the floating-point operations of a forward pass per token, causal attention counted once."""
    return glm4_moe.flops_per_token(decoder(hf), sequence_length)


def tiny() -> dict[str, Any]:
    """Return a config that trains on a laptop in seconds."""
    left_out = ("architectures", "use_qk_norm")
    text = {key: value for key, value in glm4_moe.tiny().items() if key not in left_out}
    return tiny_around(
        "Glm4vMoeForConditionalGeneration",
        "glm4v_moe",
        {**text, "model_type": "glm4v_moe_text"},
        "glm4v_moe_vision",
    )
