"""The GLM-4.5 family."""

from __future__ import annotations

from anygauge_hooks.models import ModelSpec
from anygauge_models.architecture import next_token_layers, with_defaults, with_experts
from anygauge_models.glm4_moe import config
from anygauge_models.glm4_moe.rotary import rotary
from anygauge_models.glm4_moe.weights import weight_rules

__all__ = ["GLM4_MOE"]


GLM4_MOE = with_defaults(
    ModelSpec(
        name="glm4_moe",
        architectures=("Glm4MoeForCausalLM",),
        transformer_config=config.transformer_config,
        model_options=config.model_options,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=lambda hf: with_experts(hf, config.expert_layers(hf)),
        unused_weights=next_token_layers,
        flops_per_token=config.flops_per_token,
        tiny=config.tiny,
    ),
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=131_072,
)
