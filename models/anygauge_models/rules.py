"""The weight rules that families are put together from: attention, MLPs, experts, and what is around them.

Canonical names are Transformer Engine's. A piece takes the sizes that it needs and the layers that have it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from anygauge_hooks.megatron import WeightRule

__all__ = [
    "decoder_rules",
    "dense_mlp",
    "expert_mlp",
    "inside",
    "layer_rule",
    "norm_before_attention",
    "post_norms",
    "self_attention",
    "shared_expert",
]

Layers = tuple[int, ...] | None


def decoder_rules(hf: Mapping[str, Any], layers: Sequence[WeightRule]) -> list[WeightRule]:
    """Return the rules of a decoder: embedding, layers, final norm, output layer unless it is tied."""
    rules = [
        WeightRule(
            canonical="embedding.word_embeddings.weight",
            hf=("model.embed_tokens.weight",),
            split_dim=0,
            pads_vocab=True,
        ),
        *layers,
        WeightRule(canonical="decoder.final_layernorm.weight", hf=("model.norm.weight",)),
    ]
    if not hf.get("tie_word_embeddings", False):
        rules.append(
            WeightRule(canonical="output_layer.weight", hf=("lm_head.weight",), split_dim=0, pads_vocab=True)
        )
    return rules


def inside(prefix: str, rules: Sequence[WeightRule]) -> list[WeightRule]:
    """Return the rules of a decoder that is one part of a larger model.

    :param prefix: Prefix of the decoder's names in its checkpoints, in the place of ``model.``.
    """
    return [replace(rule, hf=tuple(re.sub(r"^model\.", prefix, name) for name in rule.hf)) for rule in rules]


def layer_rule(canonical: str, *hf: str, **options: Any) -> WeightRule:
    """Return a rule of a layer; names are relative to the layer."""
    return WeightRule(
        canonical=f"decoder.layers.{{layer}}.{canonical}",
        hf=tuple(f"model.layers.{{layer}}.{name}" for name in hf),
        **options,
    )


def norm_before_attention(
    canonical: str = "self_attention.linear_qkv.layer_norm_weight", *, layers: Layers = None
) -> WeightRule:
    """Return the rule of the norm before attention."""
    return layer_rule(canonical, "input_layernorm.weight", layers=layers)


def self_attention(
    *,
    heads: int,
    groups: int,
    size: int,
    qk_norm: bool = False,
    bias: bool = False,
    gated: bool = False,
    fused: bool = False,
    pre_norm: bool = True,
    layers: Layers = None,
) -> list[WeightRule]:
    """Return the rules of attention with grouped queries and of the norm before it.

    :param heads: Query heads.
    :param groups: Key and value heads.
    :param size: Size of a head.
    :param qk_norm: Whether queries and keys are normalized.
    :param bias: Whether queries, keys and values have biases.
    :param gated: Whether each query head is followed by its gate.
    :param fused: Whether checkpoints hold queries above keys above values in one tensor.
    :param pre_norm: Whether there is a norm before it.
    """
    sizes = (heads * size * (2 if gated else 1), groups * size, groups * size)
    sections = (sizes,) if fused else tuple((each,) for each in sizes)
    qkv: dict[str, Any] = {"transform": "interleave", "sections": sections, "groups": groups, "split_dim": 0}
    qkv["layers"] = layers
    rules = [norm_before_attention(layers=layers)] if pre_norm else []
    for part in ("weight", "bias") if bias else ("weight",):
        names = (f"self_attn.{x}_proj.{part}" for x in (("qkv",) if fused else "qkv"))
        rules.append(layer_rule(f"self_attention.linear_qkv.{part}", *names, **qkv))
    if qk_norm:
        rules += [
            layer_rule(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight", layers=layers)
            for x in "qk"
        ]
    output = "self_attention.linear_proj.weight", "self_attn.o_proj.weight"
    return [*rules, layer_rule(*output, split_dim=1, layers=layers)]


def post_norms(attention: str, mlp: str) -> list[WeightRule]:
    """Return the rules of the norms of what attention and MLP add.

    :param attention: Name of the first in a checkpoint.
    :param mlp: Name of the second.
    """
    names = {"post_self_attn_layernorm": attention, "post_mlp_layernorm": mlp}
    return [layer_rule(f"{canonical}.weight", f"{name}.weight") for canonical, name in names.items()]


def dense_mlp(
    width: int, *, fused: bool = False, norm: str | None = "post_attention_layernorm", layers: Layers = None
) -> list[WeightRule]:
    """Return the rules of a gated MLP and of the norm before it.

    :param width: Rows of gate and of up.
    :param fused: Whether checkpoints hold gate above up in one tensor.
    :param norm: Name of the norm in a checkpoint; ``None`` for no norm.
    """
    canonical = "mlp.linear_fc1.layer_norm_weight"
    before = [] if norm is None else [layer_rule(canonical, f"{norm}.weight", layers=layers)]
    return [*before, *_gated("mlp", "mlp", width, fused=fused, layers=layers)]


def expert_mlp(
    *,
    experts: int,
    width: int,
    bias: str | None = None,
    stacked: bool = False,
    transposed: bool = False,
    layers: Layers = None,
) -> list[WeightRule]:
    """Return the rules of a router, its experts, and the norm before them.

    :param experts: Their number.
    :param width: Rows of an expert's gate and of its up.
    :param bias: Name of the router's bias in a checkpoint, relative to the MLP.
    :param stacked: Whether checkpoints hold the tensors of all experts in one.
    :param transposed: Whether the matrices of such stacks are transposed.
    """
    rules = [
        layer_rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", layers=layers),
        layer_rule("mlp.router.weight", "mlp.gate.weight", layers=layers),
    ]
    if bias is not None:
        rules.append(layer_rule("mlp.router.expert_bias", f"mlp.{bias}", layers=layers))
    fc1: dict[str, Any] = {"sections": ((width, width),)} if stacked else _gate_above_up(width)
    hf1 = ("gate_up_proj",) if stacked else ("{expert}.gate_proj.weight", "{expert}.up_proj.weight")
    hf2 = "down_proj" if stacked else "{expert}.down_proj.weight"
    common: dict[str, Any] = {"experts": experts, "layers": layers, "transposed": transposed}
    # How the matrices of a stack lie is told by their width.
    fc2: dict[str, Any] = {"sections": ((width,),)} if transposed else {}
    names = (f"mlp.experts.{name}" for name in hf1)
    return [
        *rules,
        layer_rule("mlp.experts.linear_fc1.weight{expert}", *names, split_dim=0, **fc1, **common),
        layer_rule(
            "mlp.experts.linear_fc2.weight{expert}", f"mlp.experts.{hf2}", split_dim=1, **fc2, **common
        ),
    ]


def shared_expert(
    name: str, width: int, *, gate: str | None = None, layers: Layers = None
) -> list[WeightRule]:
    """Return the rules of the expert that every token goes to.

    :param name: Name of the expert in a checkpoint, relative to the MLP.
    :param width: Rows of its gate and of its up.
    :param gate: Name of the weight of its gate in a checkpoint, relative to the MLP.
    """
    rules = _gated("mlp.shared_experts", f"mlp.{name}", width, layers=layers)
    if gate is not None:
        rules.append(layer_rule("mlp.shared_experts.gate_weight", f"mlp.{gate}", layers=layers))
    return rules


def _gated(
    canonical: str, hf: str, width: int, *, fused: bool = False, layers: Layers = None
) -> list[WeightRule]:
    options: dict[str, Any] = {"sections": ((width, width),)} if fused else _gate_above_up(width)
    names = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
    weights = (f"{hf}.{name}.weight" for name in names)
    return [
        layer_rule(f"{canonical}.linear_fc1.weight", *weights, split_dim=0, layers=layers, **options),
        layer_rule(f"{canonical}.linear_fc2.weight", f"{hf}.down_proj.weight", split_dim=1, layers=layers),
    ]


def _gate_above_up(width: int) -> dict[str, Any]:
    return {"transform": "concat", "sections": ((width,), (width,))}
