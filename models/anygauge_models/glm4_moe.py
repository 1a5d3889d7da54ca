"""GLM-4.5 and later, a mixture of experts behind some dense layers (https://arxiv.org/abs/2508.06471)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.megatron import LayerKind, MegatronModel, WeightRule
from anygauge_models.architecture import (
    Variant,
    attention_flops,
    attention_sizes,
    decoder_config,
    head_size,
    make_family,
    next_token_layers,
    refuse_variants,
    single_expert,
    with_experts,
)
from anygauge_models.deepseek_v3 import expert_layers, mixture_config, mixture_flops, mixture_rules
from anygauge_models.rope import half_rotary, turning_part
from anygauge_models.rules import self_attention

__all__ = [
    "DEFAULTS",
    "GLM4_MOE",
    "flops_per_token",
    "layers",
    "rotary",
    "transformer_config",
    "weight_rules",
]

DEFAULTS: Mapping[str, Any] = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1}


def has_bias(hf: Mapping[str, Any]) -> bool:
    """Return whether queries, keys and values have biases."""
    return bool(hf.get("attention_bias", False))


def has_qk_norm(hf: Mapping[str, Any]) -> bool:
    """Return whether queries and keys are normalized."""
    return bool(hf.get("use_qk_norm", False))


def rotary_dim(hf: Mapping[str, Any]) -> int:
    """Return how many dimensions of a head turn with the position; half of them by default."""
    return turning_part(hf, head_size(hf), 0.5)


def attention_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return query heads, groups of them, and the size of a head."""
    return attention_sizes(hf, head_size(hf))


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    refuse_variants(hf, "glm4_moe", _refused(hf))
    return decoder_config(
        hf,
        **attention_of(hf),
        qk_layernorm=has_qk_norm(hf),
        add_qkv_bias=has_bias(hf),
        **mixture_config(hf, scaling=1.0),
    )


def _refused(hf: Mapping[str, Any]) -> list[Variant]:
    return [
        ("n_group", hf.get("n_group", 1) != 1, "one group of experts"),
        ("norm_topk_prob", not hf.get("norm_topk_prob", True), "true"),
        single_expert(hf),
        ("n_shared_experts", not hf.get("n_shared_experts", 1), "a shared expert"),
        ("first_k_dense_replace", not expert_layers(hf), "a layer of experts behind the dense ones"),
    ]


def flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Return the floating-point operations of a forward pass per token, causal attention counted once."""
    attention = attention_flops(hf["hidden_size"], **attention_of(hf), sequence_length=sequence_length)
    return mixture_flops(hf, attention)


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    attention = self_attention(**attention_of(hf), qk_norm=has_qk_norm(hf), bias=has_bias(hf))
    return mixture_rules(hf, attention)


def layers(hf: Mapping[str, Any]) -> list[LayerKind]:
    """Return the kind of each layer."""
    return with_experts(hf, expert_layers(hf))


# A part of each head turns, in two halves.
rotary = half_rotary(rotary_dim)


GLM4_MOE = make_family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    model=MegatronModel(
        transformer_config=transformer_config,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=layers,
    ),
    flops_per_token=flops_per_token,
    unused_weights=next_token_layers,
    defaults={**DEFAULTS, "max_position_embeddings": 131_072},
)
