"""Mistral, dense, without a sliding window (https://arxiv.org/abs/2310.06825)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.errors import ConfigError
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

__all__ = ["MISTRAL"]

_WINDOW = 4096
"""Default of transformers for configs without a window."""


def attention_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return query heads, groups of them, and the size of a head."""
    return attention_sizes(hf, head_size(hf))


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    refuse_variants(hf, "mistral", [])
    _refuse_window(hf)
    return decoder_config(hf, **attention_of(hf))


def _refuse_window(hf: Mapping[str, Any]) -> None:
    """Refuse the window of version 0.1, with which published checkpoints do come."""
    if (window := hf.get("sliding_window", _WINDOW)) is not None:
        raise ConfigError(
            f"The checkpoint's sliding_window = {window!r} is not supported by the mistral family, "
            "which needs null.",
            hint=f"Sequences of at most {window} tokens never reach the end of the window. For these, set "
            f"sliding_window to null and max_position_embeddings to {window} in json.",
        )


def flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Return the floating-point operations of a forward pass per token, causal attention counted once."""
    return dense_flops(hf, sequence_length, **attention_of(hf))


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    return decoder_rules(hf, [*self_attention(**attention_of(hf)), *dense_mlp(hf["intermediate_size"])])


rotary = half_rotary(head_size)


MISTRAL = with_defaults(
    ModelSpec(
        name="mistral",
        architectures=("MistralForCausalLM",),
        model_options=model_options,
        flops_per_token=flops_per_token,
        tiny=tiny_config("mistral"),
        assistant_turns=AssistantTurns(start="[/INST]", end="</s>"),
        engines={
            "megatron": MegatronModel(
                transformer_config=transformer_config,
                weight_rules=weight_rules,
                rotary=rotary,
                layers=lambda hf: (LayerKind(),) * hf["num_hidden_layers"],
            )
        },
    ),
    num_key_value_heads=8,
    rms_norm_eps=1e-6,
    max_position_embeddings=131_072,
)
