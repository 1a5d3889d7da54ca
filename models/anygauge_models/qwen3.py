"""Qwen3, dense, with tied or untied embeddings (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_models.architecture import Variant, head_size, sliding_windows
from anygauge_models.dense import DenseDecoder

__all__ = ["DENSE", "QWEN3"]


def _refused(hf: Mapping[str, Any]) -> list[Variant]:
    return [*sliding_windows(hf), ("attention_bias", bool(hf.get("attention_bias")), "false")]


DENSE = DenseDecoder(
    family="qwen3", head_dim=lambda hf: head_size(hf, 128), refused=_refused, has_qk_norm=True
)
QWEN3 = DENSE.spec(
    "Qwen3ForCausalLM", num_key_value_heads=32, rms_norm_eps=1e-6, max_position_embeddings=32_768
)
