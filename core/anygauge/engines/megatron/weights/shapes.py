"""Shapes of whole canonical tensors, from the fields of Megatron's config and without a model.

A name that is not listed here, such as one of a vision tower, is checked by its rule alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from anygauge.engines.megatron.weights.mapping import TensorRule

__all__ = ["shape_problem"]

Fields = Mapping[str, Any]
_PLACE = re.compile(r"decoder\.(layers\.\d+\.)?|(?=embedding\.)|(?=output_layer\.)")
"""Prefix of a tensor's name inside a layer."""
_EXPERT = re.compile(r"(mlp\.experts\.linear_fc[12]\.(?:weight|bias))\d+")


_HIDDEN, _ANY_ROWS = ("hidden_size",), (None, "hidden_size")
_SHAPES: Mapping[str, Sequence[str | int | None]] = {
    "embedding.word_embeddings.weight": _ANY_ROWS,
    "output_layer.weight": _ANY_ROWS,
    "final_layernorm.weight": _HIDDEN,
    "input_layernorm.weight": _HIDDEN,
    "pre_mlp_layernorm.weight": _HIDDEN,
    "post_self_attn_layernorm.weight": _HIDDEN,
    "post_mlp_layernorm.weight": _HIDDEN,
    "self_attention.linear_qkv.layer_norm_weight": _HIDDEN,
    "self_attention.linear_qkv.weight": _ANY_ROWS,
    "self_attention.linear_qkv.bias": (None,),
    "self_attention.q_layernorm.weight": ("normalized_queries",),
    "self_attention.k_layernorm.weight": ("normalized_keys",),
    "self_attention.core_attention.softmax_offset": ("num_attention_heads",),
    "self_attention.linear_proj.weight": ("hidden_size", "values"),
    "self_attention.linear_proj.bias": _HIDDEN,
    "self_attention.linear_q_proj.weight": ("latent_queries", "hidden_size"),
    "self_attention.linear_q_down_proj.weight": ("q_lora_rank", "hidden_size"),
    "self_attention.linear_q_up_proj.layer_norm_weight": ("q_lora_rank",),
    "self_attention.linear_q_up_proj.weight": ("latent_queries", "q_lora_rank"),
    "self_attention.linear_kv_down_proj.weight": ("compressed", "hidden_size"),
    "self_attention.linear_kv_up_proj.layer_norm_weight": ("kv_lora_rank",),
    "self_attention.linear_kv_up_proj.weight": ("latent_keys_and_values", "kv_lora_rank"),
    "self_attention.in_proj.layer_norm_weight": _HIDDEN,
    "self_attention.in_proj.weight": _ANY_ROWS,
    "self_attention.conv1d.weight": (None, 1, "linear_conv_kernel_dim"),
    "self_attention.dt_bias": ("linear_num_value_heads",),
    "self_attention.A_log": ("linear_num_value_heads",),
    "self_attention.out_norm.weight": ("linear_value_head_dim",),
    "self_attention.out_proj.weight": ("hidden_size", "delta_values"),
    "mlp.linear_fc1.layer_norm_weight": _HIDDEN,
    "mlp.linear_fc1.weight": _ANY_ROWS,
    "mlp.linear_fc2.weight": ("hidden_size", "ffn_hidden_size"),
    "mlp.router.weight": ("num_moe_experts", "hidden_size"),
    "mlp.router.bias": ("num_moe_experts",),
    "mlp.router.expert_bias": ("num_moe_experts",),
    "mlp.experts.linear_fc1.weight": _ANY_ROWS,
    "mlp.experts.linear_fc1.bias": (None,),
    "mlp.experts.linear_fc2.weight": ("hidden_size", "moe_ffn_hidden_size"),
    "mlp.experts.linear_fc2.bias": _HIDDEN,
    "mlp.shared_experts.linear_fc1.weight": _ANY_ROWS,
    "mlp.shared_experts.linear_fc2.weight": ("hidden_size", "moe_shared_expert_intermediate_size"),
    "mlp.shared_experts.gate_weight": (1, "hidden_size"),
}
"""Shapes by name inside a layer, in Transformer Engine's names: fields of the config, or products of
:data:`_PRODUCTS`; ``None`` for rows fixed by the sections or the vocabulary."""
_PRODUCTS: Mapping[str, tuple[str | None, Sequence[str]]] = {
    "compressed": (None, ("kv_lora_rank", "qk_pos_emb_head_dim")),
    "latent_queries": ("num_attention_heads", ("qk_head_dim", "qk_pos_emb_head_dim")),
    "latent_keys_and_values": ("num_attention_heads", ("qk_head_dim", "v_head_dim")),
    "latent_values": ("num_attention_heads", ("v_head_dim",)),
    "head_values": ("num_attention_heads", ("kv_channels",)),
    "normalized_queries": ("num_attention_heads", ("kv_channels",)),
    "normalized_keys": ("num_query_groups", ("kv_channels",)),
    "delta_values": ("linear_num_value_heads", ("linear_value_head_dim",)),
}
"""Number of heads, and the parts of one head, whose sizes are added."""


def _size(dimension: str | int | None, fields: Fields) -> int | None:
    if not isinstance(dimension, str):
        return dimension
    if dimension == "values":
        dimension = "latent_values" if "kv_lora_rank" in fields else "head_values"
    if dimension.startswith("normalized") and fields["qk_layernorm"]:  # each head by itself
        dimension = "kv_channels"
    heads, parts = _PRODUCTS.get(dimension, (None, (dimension,)))
    return int(fields[heads] if heads else 1) * sum(int(fields[part]) for part in parts)


def shape_problem(rule: TensorRule, shape: Sequence[int], fields: Fields, owner: str = "") -> str | None:
    """Return why a canonical tensor does not have the model's shape, or ``None``.

    :param shape: Whole, perhaps with the padding of a vocabulary.
    :param fields: Fields of ``TransformerConfig``.
    :param owner: Path from the model to what has its decoder.
    """
    name = rule.canonical.removeprefix(f"{owner}.")
    place = _PLACE.match(name)
    inner = name[place.end() :] if place else ""
    match = _EXPERT.fullmatch(inner)
    expected = _SHAPES.get(match[1] if match else inner)
    if expected is None:
        return None
    wanted = tuple(_size(dimension, fields) for dimension in expected)
    if len(shape) == len(wanted) and all(b in (a, None) for a, b in zip(shape, wanted, strict=True)):
        return None
    shown = ", ".join("any" if size is None else str(size) for size in wanted)
    return f"shape {tuple(shape)}, where config.json asks for ({shown})"
