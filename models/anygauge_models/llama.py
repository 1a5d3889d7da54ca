"""Llama 2 and 3 (https://arxiv.org/abs/2407.21783)."""

from __future__ import annotations

from anygauge_hooks.models import AssistantTurns
from anygauge_models.dense import DenseDecoder

__all__ = ["LLAMA"]

_BIASES = ("attention_bias", "mlp_bias")
_TURNS = AssistantTurns(start="<|start_header_id|>assistant<|end_header_id|>\n\n", end="<|eot_id|>")

LLAMA = DenseDecoder(
    family="llama", refused=lambda hf: [(key, bool(hf.get(key)), "false") for key in _BIASES]
).spec("LlamaForCausalLM", _TURNS, num_key_value_heads=None, rms_norm_eps=1e-6, max_position_embeddings=2048)
