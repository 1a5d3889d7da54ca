"""The family of Qwen3.5's dense models, of text alone and beside a vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.media import MediaSpec
from anygauge_hooks.megatron import LayerKind, MegatronModel, WeightRule
from anygauge_models.architecture import make_family
from anygauge_models.positions import frame_by_frame
from anygauge_models.qwen3_5 import config, vision
from anygauge_models.qwen3_5.config import attention_of, delta_sizes, is_linear, rotary_dim, with_vision
from anygauge_models.qwen3_5.vision import make_processor, tower_rules
from anygauge_models.rope import interleaved_rotary
from anygauge_models.rules import (
    decoder_rules,
    dense_mlp,
    inside,
    layer_rule,
    norm_before_attention,
    self_attention,
)

__all__ = ["MEDIA", "QWEN3_5", "mixing_rules", "placed", "rotary"]


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    return placed(hf, decoder_rules(hf, [*mixing_rules(hf), *dense_mlp(hf["intermediate_size"])]))


def placed(hf: Mapping[str, Any], rules: list[WeightRule]) -> list[WeightRule]:
    """Return rules under the names that a decoder has beside a vision tower, and the tower's, if it is."""
    return [*inside("model.language_model.", rules), *tower_rules(hf)] if with_vision(hf) else rules


def mixing_rules(hf: Mapping[str, Any], *, by_heads: bool = False) -> list[WeightRule]:
    """Return the rules of gated attention and gated delta nets, and of the norms before them.

    :param by_heads: Whether checkpoints hold the projections of delta nets key head by key head.
    """
    linear = is_linear(hf)
    full = tuple(index for index, is_delta in enumerate(linear) if not is_delta)
    attention = self_attention(**attention_of(hf), qk_norm=True, gated=True, layers=full)
    deltas = tuple(index for index, is_delta in enumerate(linear) if is_delta)
    return [*attention, *_delta_net(hf, by_heads, layers=deltas)]


def _delta_net(hf: Mapping[str, Any], by_heads: bool, **common: Any) -> list[WeightRule]:
    """Return the rules of gated delta nets; queries, keys and values are divided each by itself."""
    keys, values, _ = delta_sizes(hf)
    names, how = _projections(hf, by_heads)
    projections = (f"linear_attn.in_proj_{name}.weight" for name in names)
    return [
        norm_before_attention("self_attention.in_proj.layer_norm_weight", **common),
        layer_rule("self_attention.in_proj.weight", *projections, split_dim=0, **how, **common),
        layer_rule(
            "self_attention.conv1d.weight",
            "linear_attn.conv1d.weight",
            sections=((keys, keys, values),),
            split_dim=0,
            **common,
        ),
        layer_rule("self_attention.dt_bias", "linear_attn.dt_bias", split_dim=0, **common),
        layer_rule("self_attention.A_log", "linear_attn.A_log", split_dim=0, **common),
        layer_rule("self_attention.out_norm.weight", "linear_attn.norm.weight", **common),
        layer_rule("self_attention.out_proj.weight", "linear_attn.out_proj.weight", split_dim=1, **common),
    ]


def _projections(hf: Mapping[str, Any], by_heads: bool) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of the projections in checkpoints, and how they become one."""
    keys, values, heads = delta_sizes(hf)
    if by_heads:
        parts = ((keys, keys, values, values), (heads, heads))
        groups = hf["linear_num_key_heads"]
        return ("qkvz", "ba"), {"transform": "deinterleave", "sections": parts, "groups": groups}
    apart = ((keys, keys, values), (values,), (heads,), (heads,))
    return ("qkv", "z", "b", "a"), {"transform": "concat", "sections": apart}


# A part of each head turns. In text the three axes of a position are one.
rotary = interleaved_rotary(rotary_dim, (11, 11, 10), 10_000.0)


MEDIA = MediaSpec(
    make_processor=make_processor,
    towers=vision.towers,
    positions=frame_by_frame,
    flops=vision.flops,
    forbidden=config.forbidden,
)


def _layers(hf: Mapping[str, Any]) -> list[LayerKind]:
    return [LayerKind(attention="gated_delta" if linear else "gated") for linear in config.is_linear(hf)]


QWEN3_5 = make_family(
    "qwen3_5",
    *("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    model=MegatronModel(
        transformer_config=config.transformer_config,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=_layers,
    ),
    flops_per_token=config.flops_per_token,
    unused_weights=config.unused_weights,
    media=MEDIA,
    defaults={"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768},
)
