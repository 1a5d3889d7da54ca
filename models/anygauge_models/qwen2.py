"""Qwen2 and Qwen2.5, dense, with tied or untied embeddings (https://arxiv.org/abs/2412.15115)."""

from __future__ import annotations

from anygauge_models.architecture import sliding_windows
from anygauge_models.dense import DenseDecoder

__all__ = ["QWEN2"]

# The family has no key for biases: queries, keys and values always have them.
QWEN2 = DenseDecoder(family="qwen2", refused=sliding_windows, has_bias=lambda hf: True).spec(
    "Qwen2ForCausalLM", num_key_value_heads=32, rms_norm_eps=1e-6, max_position_embeddings=32_768
)
