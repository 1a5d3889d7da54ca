"""The family of GLM-4.5V."""

from __future__ import annotations

from anygauge_hooks.media import MediaSpec
from anygauge_hooks.models import ModelSpec
from anygauge_models.architecture import with_defaults, with_experts
from anygauge_models.glm4v_moe import config, vision
from anygauge_models.glm4v_moe.processor import make_processor
from anygauge_models.glm4v_moe.rotary import rotary
from anygauge_models.glm4v_moe.weights import unused_weights, weight_rules
from anygauge_models.positions import frame_by_frame

__all__ = ["GLM4V_MOE"]

GLM4V_MOE = with_defaults(
    ModelSpec(
        name="glm4v_moe",
        architectures=("Glm4vMoeForConditionalGeneration",),
        transformer_config=config.transformer_config,
        model_options=config.model_options,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=lambda hf: with_experts(config.decoder(hf), config.expert_layers(hf)),
        unused_weights=unused_weights,
        flops_per_token=config.flops_per_token,
        tiny=config.tiny,
        media=MediaSpec(
            make_processor=make_processor,
            towers=vision.towers,
            positions=frame_by_frame,
            flops=vision.flops,
            forbidden=config.forbidden,
        ),
    ),
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=65_536,
)
