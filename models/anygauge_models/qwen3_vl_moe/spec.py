"""The family of Qwen3-VL's mixtures of experts."""

from __future__ import annotations

from anygauge_hooks.models import ModelSpec
from anygauge_models.architecture import CHATML, with_defaults, with_experts
from anygauge_models.qwen3_vl.spec import MEDIA
from anygauge_models.qwen3_vl_moe import config
from anygauge_models.qwen3_vl_moe.rotary import rotary
from anygauge_models.qwen3_vl_moe.weights import weight_rules

__all__ = ["QWEN3_VL_MOE"]

QWEN3_VL_MOE = with_defaults(
    ModelSpec(
        name="qwen3_vl_moe",
        architectures=("Qwen3VLMoeForConditionalGeneration",),
        transformer_config=config.transformer_config,
        model_options=config.model_options,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=lambda hf: with_experts(hf, config.expert_layers(hf)),
        flops_per_token=config.flops_per_token,
        tiny=config.tiny,
        assistant_turns=CHATML,
        media=MEDIA,
    ),
    num_key_value_heads=16,
    rms_norm_eps=1e-6,
    max_position_embeddings=128_000,
)
