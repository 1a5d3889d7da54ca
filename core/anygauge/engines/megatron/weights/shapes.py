"""Shapes of whole canonical tensors, from the fields of Megatron's config and without a model.

A name that is not listed here, such as one of a vision tower, is checked by its rule alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anygauge.engines.megatron.weights.mapping import TensorRule

__all__ = ["shape_problem"]

Fields = Mapping[str, Any]
_PLACE = re.compile(r"decoder\.(layers\.\d+\.)?|(?=embedding\.)|(?=output_layer\.)")
"""Prefix of a tensor's name inside a layer."""
_EXPERT = re.compile(r"(mlp\.experts\.linear_fc[12]\.weight)\d+")


def _hidden(fields: Fields) -> int:
    return int(fields["hidden_size"])


def _head(fields: Fields) -> int:
    return int(fields["kv_channels"])


def _query_rows(fields: Fields) -> int:
    size = int(fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"])
    return int(fields["num_attention_heads"]) * size


def _value_columns(fields: Fields) -> int:
    size = fields["v_head_dim"] if "kv_lora_rank" in fields else _head(fields)
    return int(fields["num_attention_heads"] * size)


def _delta_columns(fields: Fields) -> int:
    return int(fields["linear_num_value_heads"] * fields["linear_value_head_dim"])


def _norm(fields: Fields) -> tuple[int, ...]:
    return (_hidden(fields),)


def _columns_of(width: Callable[[Fields], int]) -> Callable[[Fields], tuple[int, ...]]:
    return lambda fields: (_hidden(fields), width(fields))


def _rows_of(key: str) -> Callable[[Fields], tuple[int, ...]]:
    return lambda fields: (fields[key], _hidden(fields))


def _vector(key: str) -> Callable[[Fields], tuple[int, ...]]:
    return lambda fields: (fields[key],)


def _any_rows(fields: Fields) -> tuple[int | None, int]:
    return (None, _hidden(fields))  # the rule says how many


_SHAPES: dict[str, Callable[[Fields], tuple[int | None, ...]]] = {
    "embedding.word_embeddings.weight": _any_rows,
    "output_layer.weight": _any_rows,
    "final_layernorm.weight": _norm,
    "input_layernorm.weight": _norm,
    "pre_mlp_layernorm.weight": _norm,
    "post_self_attn_layernorm.weight": _norm,
    "post_mlp_layernorm.weight": _norm,
    "self_attention.linear_qkv.layer_norm_weight": _norm,
    "self_attention.linear_qkv.weight": _any_rows,
    "self_attention.linear_qkv.bias": lambda fields: (None,),
    "self_attention.q_layernorm.weight": _vector("kv_channels"),
    "self_attention.k_layernorm.weight": _vector("kv_channels"),
    "self_attention.linear_proj.weight": _columns_of(_value_columns),
    "self_attention.linear_q_proj.weight": lambda fields: (_query_rows(fields), _hidden(fields)),
    "self_attention.linear_q_down_proj.weight": _rows_of("q_lora_rank"),
    "self_attention.linear_q_up_proj.layer_norm_weight": _vector("q_lora_rank"),
    "self_attention.linear_q_up_proj.weight": lambda fields: (_query_rows(fields), fields["q_lora_rank"]),
    "self_attention.linear_kv_down_proj.weight": lambda fields: (
        fields["kv_lora_rank"] + fields["qk_pos_emb_head_dim"],
        _hidden(fields),
    ),
    "self_attention.linear_kv_up_proj.layer_norm_weight": _vector("kv_lora_rank"),
    "self_attention.linear_kv_up_proj.weight": lambda fields: (
        fields["num_attention_heads"] * (fields["qk_head_dim"] + fields["v_head_dim"]),
        fields["kv_lora_rank"],
    ),
    "self_attention.in_proj.layer_norm_weight": _norm,
    "self_attention.in_proj.weight": _any_rows,
    "self_attention.conv1d.weight": lambda fields: (None, 1, fields["linear_conv_kernel_dim"]),
    "self_attention.dt_bias": _vector("linear_num_value_heads"),
    "self_attention.A_log": _vector("linear_num_value_heads"),
    "self_attention.out_norm.weight": _vector("linear_value_head_dim"),
    "self_attention.out_proj.weight": _columns_of(_delta_columns),
    "mlp.linear_fc1.layer_norm_weight": _norm,
    "mlp.linear_fc1.weight": _any_rows,
    "mlp.linear_fc2.weight": _columns_of(lambda fields: fields["ffn_hidden_size"]),
    "mlp.router.weight": _rows_of("num_moe_experts"),
    "mlp.router.expert_bias": _vector("num_moe_experts"),
    "mlp.experts.linear_fc1.weight": _any_rows,
    "mlp.experts.linear_fc2.weight": _columns_of(lambda fields: fields["moe_ffn_hidden_size"]),
    "mlp.shared_experts.linear_fc1.weight": _any_rows,
    "mlp.shared_experts.linear_fc2.weight": _columns_of(
        lambda fields: fields["moe_shared_expert_intermediate_size"]
    ),
    "mlp.shared_experts.gate_weight": lambda fields: (1, _hidden(fields)),
}
"""Shapes by name inside a layer, in Transformer Engine's names; ``None`` for rows fixed by the sections or
the vocabulary."""


def shape_problem(rule: TensorRule, shape: Sequence[int], fields: Fields, owner: str = "") -> str | None:
    """Return why a canonical tensor has not the shape that the model has, if so.

    :param shape: Whole, perhaps with the padding of a vocabulary.
    :param fields: Of ``TransformerConfig``.
    :param owner: Path from the model to what has its decoder.
    """
    name = rule.canonical.removeprefix(f"{owner}.")
    place = _PLACE.match(name)
    inner = name[place.end() :] if place else ""
    match = _EXPERT.fullmatch(inner)
    expected = _SHAPES.get(match[1] if match else inner)
    if expected is None:
        return None
    wanted = expected(fields)
    if len(shape) == len(wanted) and all(b in (a, None) for a, b in zip(shape, wanted, strict=True)):
        return None
    shown = ", ".join("any" if size is None else str(size) for size in wanted)
    return f"shape {tuple(shape)}, where config.json asks for ({shown})"
