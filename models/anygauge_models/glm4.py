"""GLM-4-0414, dense, with norms before and after attention and MLP (https://arxiv.org/abs/2406.12793)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_models.architecture import head_size
from anygauge_models.dense import DenseDecoder
from anygauge_models.rope import turning_part

__all__ = ["DENSE", "GLM4"]


def _head_dim(hf: Mapping[str, Any]) -> int:
    return head_size(hf, 128)


DENSE = DenseDecoder(
    family="glm4",
    head_dim=_head_dim,
    # Half of a head turns, in pairs of neighbors. `rotary_interleaved` lets attention move them into halves.
    rotary_dim=lambda hf: turning_part(hf, _head_dim(hf), 0.5),
    has_bias=lambda hf: bool(hf.get("attention_bias", True)),
    post_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
    has_fused_mlp=True,
    fields=lambda hf: {"rotary_interleaved": True},
)
GLM4 = DENSE.spec(
    "Glm4ForCausalLM", num_key_value_heads=2, rms_norm_eps=1.5625e-7, max_position_embeddings=131_072
)
