"""The weight mapping of Qwen3.5's text models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.models import WeightRule
from anygauge_models.qwen3_5.config import attention_of, delta_sizes, is_linear, with_vision
from anygauge_models.qwen3_5.vision import tower_rules
from anygauge_models.rules import (
    decoder_rules,
    dense_mlp,
    inside,
    layer_rule,
    norm_before_attention,
    self_attention,
)

__all__ = ["mixing_rules", "placed", "weight_rules"]


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    return placed(hf, decoder_rules(hf, [*mixing_rules(hf), *dense_mlp(hf["intermediate_size"])]))


def placed(hf: Mapping[str, Any], rules: list[WeightRule]) -> list[WeightRule]:
    """Return rules under the names that a decoder has beside a vision tower, and the tower's, if it is."""
    return [*inside("model.language_model.", rules), *tower_rules(hf)] if with_vision(hf) else rules


def mixing_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return the rules of gated attention and gated delta nets, and of the norms before them."""
    linear = is_linear(hf)
    full = tuple(index for index, is_delta in enumerate(linear) if not is_delta)
    attention = self_attention(**attention_of(hf), qk_norm=True, gated=True, layers=full)
    return [*attention, *_delta_net(hf, tuple(index for index, is_delta in enumerate(linear) if is_delta))]


def _delta_net(hf: Mapping[str, Any], layers: tuple[int, ...]) -> list[WeightRule]:
    """Return the rules of gated delta nets; queries, keys and values are divided each by itself."""
    keys, values, heads = delta_sizes(hf)
    mixed = (keys, keys, values)
    each: dict[str, Any] = {"layers": layers}
    projections = (f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
    return [
        norm_before_attention("self_attention.in_proj.layer_norm_weight", **each),
        layer_rule(
            "self_attention.in_proj.weight",
            *projections,
            transform="concat",
            sections=(mixed, (values,), (heads,), (heads,)),
            split_dim=0,
            **each,
        ),
        layer_rule(
            "self_attention.conv1d.weight",
            "linear_attn.conv1d.weight",
            sections=(mixed,),
            split_dim=0,
            **each,
        ),
        layer_rule("self_attention.dt_bias", "linear_attn.dt_bias", split_dim=0, **each),
        layer_rule("self_attention.A_log", "linear_attn.A_log", split_dim=0, **each),
        layer_rule("self_attention.out_norm.weight", "linear_attn.norm.weight", **each),
        layer_rule("self_attention.out_proj.weight", "linear_attn.out_proj.weight", split_dim=1, **each),
    ]
