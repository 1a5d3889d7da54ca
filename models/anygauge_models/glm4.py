"""GLM-4-0414, dense, with norms before and after attention and MLP (https://arxiv.org/abs/2406.12793)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.megatron import LayerKind, MegatronModel, WeightRule
from anygauge_hooks.models import ModelSpec
from anygauge_models.architecture import (
    attention_sizes,
    decoder_config,
    dense_flops,
    head_size,
    model_options,
    refuse_variants,
    tiny_config,
    with_defaults,
)
from anygauge_models.rope import half_rotary, turning_part
from anygauge_models.rules import decoder_rules, dense_mlp, post_norms, self_attention

__all__ = ["GLM4", "flops_per_token", "model_options", "transformer_config", "weight_rules"]


def head_dim(hf: Mapping[str, Any]) -> int:
    """Return the size of one attention head."""
    return head_size(hf, 128)


def has_bias(hf: Mapping[str, Any]) -> bool:
    """Return whether queries, keys and values have biases."""
    return bool(hf.get("attention_bias", True))


def rotary_dim(hf: Mapping[str, Any]) -> int:
    """Return how many dimensions of a head turn with the position; half of them by default."""
    return turning_part(hf, head_dim(hf), 0.5)


def attention_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return query heads, groups of them, and the size of a head."""
    return attention_sizes(hf, head_dim(hf))


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    refuse_variants(hf, "glm4", [])
    return decoder_config(
        hf,
        **attention_of(hf),
        add_qkv_bias=has_bias(hf),
        rotary_interleaved=True,
    )


def flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Return the floating-point operations of a forward pass per token, causal attention counted once."""
    return dense_flops(hf, sequence_length, **attention_of(hf))


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    attention = self_attention(**attention_of(hf), bias=has_bias(hf))
    return decoder_rules(hf, [*attention, *dense_mlp(hf["intermediate_size"], fused=True), *post_norms()])


# A part of each head turns, in pairs of neighbors. `rotary_interleaved` lets attention move them into halves.
rotary = half_rotary(rotary_dim)


GLM4 = with_defaults(
    ModelSpec(
        name="glm4",
        architectures=("Glm4ForCausalLM",),
        model_options=model_options,
        flops_per_token=flops_per_token,
        tiny=tiny_config("glm4"),
        engines={
            "megatron": MegatronModel(
                transformer_config=transformer_config,
                weight_rules=weight_rules,
                rotary=rotary,
                layers=lambda hf: (LayerKind(post_norms=True),) * hf["num_hidden_layers"],
            )
        },
    ),
    num_key_value_heads=2,
    rms_norm_eps=1.5625e-7,
    max_position_embeddings=131_072,
)
