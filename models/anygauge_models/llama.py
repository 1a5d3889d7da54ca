"""Llama 2 and 3 (https://arxiv.org/abs/2407.21783)."""

from __future__ import annotations

from anygauge_models.dense import DenseDecoder

__all__ = ["LLAMA"]

_BIASES = ("attention_bias", "mlp_bias")

LLAMA = DenseDecoder(
    family="llama", refused=lambda hf: [(key, bool(hf.get(key)), "false") for key in _BIASES]
).spec("LlamaForCausalLM", num_key_value_heads=None, rms_norm_eps=1e-6, max_position_embeddings=2048)
