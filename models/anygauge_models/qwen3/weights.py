"""The weight mapping of Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.models import WeightRule

__all__ = ["weight_rules"]

_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    rules = [
        WeightRule(
            canonical="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",), split_dim=0
        ),
        *_attention(),
        *_mlp(),
        WeightRule(canonical="decoder.final_layernorm.weight", hf=("model.norm.weight",)),
    ]
    if not hf.get("tie_word_embeddings", False):
        rules.append(WeightRule(canonical="output_layer.weight", hf=("lm_head.weight",), split_dim=0))
    return rules


def _layer(canonical: str, *hf: str, **options: Any) -> WeightRule:
    return WeightRule(canonical=_MEGATRON + canonical, hf=tuple(_HF + name for name in hf), **options)


def _attention() -> list[WeightRule]:
    projections = (f"self_attn.{x}_proj.weight" for x in "qkv")
    return [
        _layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        _layer("self_attention.linear_qkv.weight", *projections, transform="interleave_qkv", split_dim=0),
        _layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
        _layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
        _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", split_dim=1),
    ]


def _mlp() -> list[WeightRule]:
    return [
        _layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
        _layer(
            "mlp.linear_fc1.weight",
            "mlp.gate_proj.weight",
            "mlp.up_proj.weight",
            transform="concat_gate_up",
            split_dim=0,
        ),
        _layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", split_dim=1),
    ]
