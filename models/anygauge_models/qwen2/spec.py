"""The Qwen2 family."""

from __future__ import annotations

from anygauge_hooks.models import LayerKind, ModelSpec
from anygauge_models.architecture import CHATML, with_defaults
from anygauge_models.qwen2 import config
from anygauge_models.qwen2.rotary import rotary
from anygauge_models.qwen2.weights import weight_rules

__all__ = ["QWEN2"]

QWEN2 = with_defaults(
    ModelSpec(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        transformer_config=config.transformer_config,
        model_options=config.model_options,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=lambda hf: (LayerKind(),) * hf["num_hidden_layers"],
        flops_per_token=config.flops_per_token,
        tiny=config.tiny,
        assistant_turns=CHATML,
    ),
    num_key_value_heads=32,
    rms_norm_eps=1e-6,
    max_position_embeddings=32_768,
)
