"""GLM-4.5 and later, a mixture of experts behind some dense layers (https://arxiv.org/abs/2508.06471)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.megatron import MegatronModel, WeightRule
from anygauge_hooks.models import ModelSpec
from anygauge_models.architecture import (
    Variant,
    attention_flops,
    attention_sizes,
    decoder_config,
    expert_config,
    head_size,
    model_options,
    next_token_layers,
    refuse_variants,
    single_expert,
    sparse_flops,
    tiny_config,
    with_defaults,
    with_experts,
)
from anygauge_models.rope import half_rotary, turning_part
from anygauge_models.rules import decoder_rules, dense_mlp, expert_mlp, self_attention, shared_expert

__all__ = [
    "GLM4_MOE",
    "expert_layers",
    "flops_per_token",
    "model_options",
    "rotary",
    "transformer_config",
    "weight_rules",
]


def has_bias(hf: Mapping[str, Any]) -> bool:
    """Return whether queries, keys and values have biases."""
    return bool(hf.get("attention_bias", False))


def has_qk_norm(hf: Mapping[str, Any]) -> bool:
    """Return whether queries and keys are normalised."""
    return bool(hf.get("use_qk_norm", False))


def rotary_dim(hf: Mapping[str, Any]) -> int:
    """Return how many dimensions of a head turn with the position; half of them by default."""
    return turning_part(hf, head_size(hf), 0.5)


def attention_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return query heads, groups of them, and the size of a head."""
    return attention_sizes(hf, head_size(hf))


def expert_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers whose MLP is a mixture of experts: all but the first ones."""
    return tuple(range(hf.get("first_k_dense_replace", 1), hf["num_hidden_layers"]))


def shared_width(hf: Mapping[str, Any]) -> int:
    """Return the rows of the gate and of the up of the expert that every token goes to."""
    return int(hf["moe_intermediate_size"] * hf.get("n_shared_experts", 1))


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    refuse_variants(hf, "glm4_moe", _refused(hf))
    experts = expert_config(
        experts=hf["n_routed_experts"],
        top_k=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=hf.get("routed_scaling_factor", 1.0),
        moe_shared_expert_intermediate_size=shared_width(hf),
    )
    return decoder_config(
        hf,
        **attention_of(hf),
        qk_layernorm=has_qk_norm(hf),
        add_qkv_bias=has_bias(hf),
        **experts,
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
    width = hf["num_experts_per_tok"] * hf["moe_intermediate_size"] + shared_width(hf)
    attention = attention_flops(hf["hidden_size"], **attention_of(hf), sequence_length=sequence_length)
    return sparse_flops(
        hf, attention, sparse=len(expert_layers(hf)), width=width, experts=hf["n_routed_experts"]
    )


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    sparse = expert_layers(hf)
    attention = self_attention(**attention_of(hf), qk_norm=has_qk_norm(hf), bias=has_bias(hf))
    experts = expert_mlp(
        experts=hf["n_routed_experts"],
        width=hf["moe_intermediate_size"],
        bias="gate.e_score_correction_bias",
        layers=sparse,
    )
    dense = dense_mlp(hf["intermediate_size"], layers=tuple(range(hf["num_hidden_layers"] - len(sparse))))
    shared = shared_expert("shared_experts", shared_width(hf), layers=sparse)
    return decoder_rules(hf, [*attention, *dense, *experts, *shared])


# A part of each head turns, in two halves.
rotary = half_rotary(rotary_dim)


GLM4_MOE = with_defaults(
    ModelSpec(
        name="glm4_moe",
        architectures=("Glm4MoeForCausalLM",),
        model_options=model_options,
        unused_weights=next_token_layers,
        flops_per_token=flops_per_token,
        tiny=tiny_config("glm4_moe"),
        engines={
            "megatron": MegatronModel(
                transformer_config=transformer_config,
                weight_rules=weight_rules,
                rotary=rotary,
                layers=lambda hf: with_experts(hf, expert_layers(hf)),
            )
        },
    ),
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=131_072,
)
