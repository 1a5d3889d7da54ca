"""Qwen2 and Qwen2.5, dense, with tied or untied embeddings (https://arxiv.org/abs/2412.15115)."""

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

__all__ = ["QWEN2"]


def attention_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return query heads, groups of them, and the size of a head."""
    return attention_sizes(hf, head_size(hf))


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    Queries, keys and values always have biases: the family has no key for them.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    refuse_variants(hf, "qwen2", sliding_windows(hf))
    return decoder_config(hf, **attention_of(hf), add_qkv_bias=True)


def flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Return the floating-point operations of a forward pass per token, causal attention counted once."""
    return dense_flops(hf, sequence_length, **attention_of(hf))


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    attention = self_attention(**attention_of(hf), bias=True)
    return decoder_rules(hf, [*attention, *dense_mlp(hf["intermediate_size"])])


rotary = half_rotary(head_size)


QWEN2 = with_defaults(
    ModelSpec(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        model_options=model_options,
        flops_per_token=flops_per_token,
        tiny=tiny_config("qwen2"),
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
