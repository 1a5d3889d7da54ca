"""The family of Qwen3's mixtures of experts."""

from __future__ import annotations

from anygauge_hooks.models import ModelSpec
from anygauge_models.architecture import CHATML, with_defaults, with_experts
from anygauge_models.qwen3_moe import config
from anygauge_models.qwen3_moe.rotary import rotary
from anygauge_models.qwen3_moe.weights import weight_rules

__all__ = ["QWEN3_MOE"]


QWEN3_MOE = with_defaults(
    ModelSpec(
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        transformer_config=config.transformer_config,
        model_options=config.model_options,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=lambda hf: with_experts(hf, config.expert_layers(hf)),
        flops_per_token=config.flops_per_token,
        tiny=config.tiny,
        assistant_turns=CHATML,
    ),
    num_key_value_heads=4,
    rms_norm_eps=1e-6,
    max_position_embeddings=32_768,
)
