"""The family of GLM-4.1V."""

from __future__ import annotations

from anygauge_hooks.media import MediaSpec
from anygauge_hooks.models import LayerKind, ModelSpec
from anygauge_models.architecture import with_defaults
from anygauge_models.glm4v import config, vision
from anygauge_models.glm4v.processor import make_processor
from anygauge_models.glm4v.rotary import rotary
from anygauge_models.glm4v.weights import weight_rules
from anygauge_models.positions import frame_by_frame

__all__ = ["GLM4V"]

GLM4V = with_defaults(
    ModelSpec(
        name="glm4v",
        architectures=("Glm4vForConditionalGeneration",),
        transformer_config=config.transformer_config,
        model_options=config.model_options,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=lambda hf: (LayerKind(post_norms=True),) * config.decoder(hf)["num_hidden_layers"],
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
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    max_position_embeddings=32_768,
)
