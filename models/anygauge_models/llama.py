"""Llama 2 and 3 (https://arxiv.org/abs/2407.21783)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.megatron import LayerKind, MegatronModel, WeightRule
from anygauge_hooks.models import AssistantTurns, ModelSpec
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
from anygauge_models.rope import half_rotary
from anygauge_models.rules import decoder_rules, dense_mlp, self_attention

__all__ = ["LLAMA"]


def attention_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return query heads, groups of them, and the size of a head."""
    return attention_sizes(hf, head_size(hf))


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    refused = [
        ("attention_bias", bool(hf.get("attention_bias")), "false"),
        ("mlp_bias", bool(hf.get("mlp_bias")), "false"),
    ]
    refuse_variants(hf, "llama", refused)
    return decoder_config(hf, **attention_of(hf))


def flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Return the floating-point operations of a forward pass per token, causal attention counted once."""
    return dense_flops(hf, sequence_length, **attention_of(hf))


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    return decoder_rules(hf, [*self_attention(**attention_of(hf)), *dense_mlp(hf["intermediate_size"])])


rotary = half_rotary(head_size)


LLAMA = with_defaults(
    ModelSpec(
        name="llama",
        architectures=("LlamaForCausalLM",),
        model_options=model_options,
        flops_per_token=flops_per_token,
        tiny=tiny_config("llama"),
        assistant_turns=AssistantTurns(
            start="<|start_header_id|>assistant<|end_header_id|>\n\n", end="<|eot_id|>"
        ),
        engines={
            "megatron": MegatronModel(
                transformer_config=transformer_config,
                weight_rules=weight_rules,
                rotary=rotary,
                layers=lambda hf: (LayerKind(),) * hf["num_hidden_layers"],
            )
        },
    ),
    num_key_value_heads=None,
    rms_norm_eps=1e-6,
    max_position_embeddings=2048,
)
