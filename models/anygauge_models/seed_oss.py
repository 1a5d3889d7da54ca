"""Seed-OSS, dense, with biases of queries, keys and values (https://github.com/ByteDance-Seed/seed-oss)."""

from __future__ import annotations

from anygauge_models.architecture import head_size
from anygauge_models.dense import DenseDecoder

__all__ = ["SEED_OSS"]

_BIASES = ("attention_out_bias", "mlp_bias")

SEED_OSS = DenseDecoder(
    family="seed_oss",
    head_dim=lambda hf: head_size(hf, 128),
    refused=lambda hf: [(key, bool(hf.get(key)), "false") for key in _BIASES],
    has_bias=lambda hf: bool(hf.get("attention_bias", True)),
).spec(
    "SeedOssForCausalLM",
    num_key_value_heads=8,
    rms_norm_eps=1e-6,
    max_position_embeddings=524_288,
)
