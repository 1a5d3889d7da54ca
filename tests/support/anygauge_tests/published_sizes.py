"""Sizes of published models, as their ``config.json`` has them."""

from __future__ import annotations

from typing import Any

__all__ = ["QWEN3_4B", "QWEN3_30B_A3B"]

QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}
"""https://huggingface.co/Qwen/Qwen3-4B/blob/main/config.json"""
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40_960,
}
"""https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json"""
