"""Gemma 3, the text models: five layers with a window to each that sees all (https://arxiv.org/abs/2503.19786)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anygauge_models.architecture import Variant, head_size, layer_windows
from anygauge_models.dense import DenseDecoder
from anygauge_models.rope import of_layer_type

__all__ = ["GEMMA3"]

_ACTIVATION = "gelu_pytorch_tanh"
_BASES = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}
"""Key of the base of the angles of each type of layers, and its default."""


def _refused(hf: Mapping[str, Any]) -> list[Variant]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return [
        ("hidden_activation", hf["hidden_activation"] != _ACTIVATION, _ACTIVATION),
        ("attention_bias", bool(hf.get("attention_bias")), "false"),
        ("use_bidirectional_attention", bool(hf.get("use_bidirectional_attention")), "false"),
        *((key, hf.get(key) is not None, "null") for key in caps),
    ]


def _windows(hf: Mapping[str, Any]) -> Sequence[int | None]:
    return layer_windows(hf, hf["sliding_window_pattern"])


def _layer_type(hf: Mapping[str, Any], kind: str) -> dict[str, Any]:
    key, theta = _BASES[kind]
    return of_layer_type(hf, kind, hf.get(key, theta))


GEMMA3 = DenseDecoder(
    family="gemma3",
    head_dim=lambda hf: head_size(hf, 256),
    refused=_refused,
    has_qk_norm=True,
    windows=_windows,
    layer_type=_layer_type,
    embedding_scale=lambda hf: hf["hidden_size"] ** 0.5,
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    mlp_norm="pre_feedforward_layernorm",
    fields=lambda hf: {
        "activation_func": "gelu_tanh",
        "layernorm_zero_centered_gamma": True,
        "softmax_scale": hf["query_pre_attn_scalar"] ** -0.5,
    },
).spec(
    "Gemma3ForCausalLM",
    num_key_value_heads=4,
    rms_norm_eps=1e-6,
    hidden_activation=_ACTIVATION,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    sliding_window_pattern=6,
    max_position_embeddings=131_072,
    tie_word_embeddings=True,
)
