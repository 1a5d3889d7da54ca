"""From the Hugging Face config of Qwen3.5's text models to Megatron's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.media import MediaKind
from anygauge_models.architecture import (
    Variant,
    attention_flops,
    attention_sizes,
    decoder_config,
    gated_mlp_flops,
    head_size,
    model_options,
    refuse_variants,
)
from anygauge_models.rope import turning_part

__all__ = [
    "attention_of",
    "delta_sizes",
    "flops_per_token",
    "forbidden",
    "hybrid_config",
    "is_linear",
    "mixing_flops",
    "model_options",
    "placeholders",
    "refused",
    "rotary_dim",
    "transformer_config",
    "unused_weights",
    "with_vision",
]


def head_dim(hf: Mapping[str, Any]) -> int:
    """Return the size of one attention head."""
    return head_size(hf, 256)


def attention_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return query heads, groups of them, and the size of a head."""
    return attention_sizes(hf, head_dim(hf))


def with_vision(hf: Mapping[str, Any]) -> bool:
    """Return whether the text model is one part of a model that sees."""
    return "text_config" in hf


def is_linear(hf: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it is a gated delta net."""
    if types := hf.get("layer_types"):
        return [kind == "linear_attention" for kind in types]
    interval = hf.get("full_attention_interval", 4)
    return [(index + 1) % interval != 0 for index in range(hf["num_hidden_layers"])]


def delta_sizes(hf: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return how wide the keys and the values of all heads of a gated delta net are, and its value heads."""
    keys = hf["linear_num_key_heads"] * hf["linear_key_head_dim"]
    values = hf["linear_num_value_heads"] * hf["linear_value_head_dim"]
    return int(keys), int(values), int(hf["linear_num_value_heads"])


def rotary_dim(hf: Mapping[str, Any]) -> int:
    """Return how many dimensions of a head turn with the position; a quarter of them by default."""
    return turning_part(hf, head_dim(hf), 0.25)


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    refuse_variants(hf, "qwen3_5", refused(hf))
    return hybrid_config(hf)


def hybrid_config(hf: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` of gated attention and gated delta nets.

    :param fields: Fields that differ.
    """
    return decoder_config(
        hf,
        **attention_of(hf),
        qk_layernorm=True,
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        linear_conv_kernel_dim=hf["linear_conv_kernel_dim"],
        linear_key_head_dim=hf["linear_key_head_dim"],
        linear_value_head_dim=hf["linear_value_head_dim"],
        linear_num_key_heads=hf["linear_num_key_heads"],
        linear_num_value_heads=hf["linear_num_value_heads"],
        **fields,
    )


def refused(hf: Mapping[str, Any]) -> list[Variant]:
    """Return the variants that are another model."""
    kinds = set(hf.get("layer_types") or ()) - {"linear_attention", "full_attention"}
    return [
        ("attention_bias", bool(hf.get("attention_bias", False)), "projections without biases"),
        ("layer_types", bool(kinds), "linear_attention and full_attention"),
    ]


def unused_weights(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of multi-token prediction, and of a vision tower that the config does not have."""
    return ("mtp.",) if "vision_config" in hf else ("mtp.", "model.visual.")


def placeholders(hf: Mapping[str, Any]) -> dict[MediaKind, int]:
    """Return the tokens that hold the places of features."""
    return {"image": hf.get("image_token_id", 248_056), "video": hf.get("video_token_id", 248_057)}


def forbidden(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that hold places; none of a model of text alone."""
    return tuple(placeholders(hf).values()) if "vision_config" in hf else ()


def flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Return the floating-point operations of a forward pass per token, causal attention counted once."""
    hidden = hf["hidden_size"]
    mlps = hf["num_hidden_layers"] * gated_mlp_flops(hidden, hf["intermediate_size"])
    return float(mixing_flops(hf, sequence_length) + mlps + 2 * hidden * hf["vocab_size"])


def mixing_flops(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Return the floating-point operations per token of the attention and the delta nets of all layers."""
    hidden, linear = hf["hidden_size"], sum(is_linear(hf))
    sizes = attention_of(hf)
    full = attention_flops(hidden, **sizes, sequence_length=sequence_length)
    full += 2 * hidden * sizes["heads"] * sizes["size"]  # the gate
    return float(linear * _delta_flops(hf) + (hf["num_hidden_layers"] - linear) * full)


def _delta_flops(hf: Mapping[str, Any]) -> float:
    """Return those of a gated delta net: a state is asked for its value, written to, and read."""
    keys, values, heads = delta_sizes(hf)
    projections = hf["hidden_size"] * (2 * keys + 3 * values + 2 * heads)
    convolution = hf["linear_conv_kernel_dim"] * (2 * keys + values)
    return float(2 * (projections + convolution + 3 * values * hf["linear_key_head_dim"]))
