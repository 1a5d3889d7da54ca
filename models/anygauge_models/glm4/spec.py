"""The GLM-4-0414 family."""

from __future__ import annotations

from anygauge_hooks.models import LayerKind, ModelSpec
from anygauge_models.architecture import with_defaults
from anygauge_models.glm4 import config
from anygauge_models.glm4.rotary import rotary
from anygauge_models.glm4.weights import weight_rules

__all__ = ["GLM4"]

GLM4 = with_defaults(
    ModelSpec(
        name="glm4",
        architectures=("Glm4ForCausalLM",),
        transformer_config=config.transformer_config,
        model_options=config.model_options,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=lambda hf: (LayerKind(post_norms=True),) * hf["num_hidden_layers"],
        flops_per_token=config.flops_per_token,
        tiny=config.tiny,
    ),
    num_key_value_heads=2,
    rms_norm_eps=1.5625e-7,
    max_position_embeddings=131_072,
)
