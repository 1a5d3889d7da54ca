"""Qwen3, dense, with tied or untied embeddings (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.megatron import LayerKind, MegatronModel, WeightRule
from anygauge_hooks.models import ModelSpec
from anygauge_models.architecture import (
    CHATML,
    attention_sizes,
    decoder_config,
    dense_flops,
    head_size,
    model_options,
    refuse_variants,
    sliding_windows,
    tiny_config,
    with_defaults,
)
from anygauge_models.rope import half_rotary
from anygauge_models.rules import decoder_rules, dense_mlp, self_attention

__all__ = ["QWEN3", "attention_of", "flops_per_token", "head_dim", "refused", "weight_rules"]


def head_dim(hf: Mapping[str, Any]) -> int:
    """Return the size of one attention head."""
    return head_size(hf, 128)


def attention_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return query heads, groups of them, and the size of a head."""
    return attention_sizes(hf, head_dim(hf))


def refused(hf: Mapping[str, Any]) -> list[tuple[str, bool, str]]:
    """Return the variants that the family has not: key, whether it is one, what is needed."""
    return [*sliding_windows(hf), ("attention_bias", bool(hf.get("attention_bias")), "false")]


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    refuse_variants(hf, "qwen3", refused(hf))
    return decoder_config(hf, **attention_of(hf), qk_layernorm=True)


def flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Return the floating-point operations of a forward pass per token, causal attention counted once."""
    return dense_flops(hf, sequence_length, **attention_of(hf))


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    attention = self_attention(**attention_of(hf), qk_norm=True)
    return decoder_rules(hf, [*attention, *dense_mlp(hf["intermediate_size"])])


rotary = half_rotary(head_dim)


QWEN3 = with_defaults(
    ModelSpec(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        model_options=model_options,
        flops_per_token=flops_per_token,
        tiny=tiny_config("qwen3"),
        assistant_turns=CHATML,
        engines={
            "megatron": MegatronModel(
                transformer_config=transformer_config,
                weight_rules=weight_rules,
                rotary=rotary,
                layers=lambda hf: (LayerKind(),) * hf["num_hidden_layers"],
            )
        },
    ),
    num_key_value_heads=32,
    rms_norm_eps=1e-6,
    max_position_embeddings=32_768,
)
