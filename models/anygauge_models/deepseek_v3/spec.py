"""The DeepSeek-V3 family."""

from __future__ import annotations

from anygauge_hooks.models import ModelSpec
from anygauge_models.architecture import next_token_layers, with_defaults, with_experts
from anygauge_models.deepseek_v3 import config
from anygauge_models.deepseek_v3.rotary import rotary
from anygauge_models.deepseek_v3.weights import weight_rules

__all__ = ["DEEPSEEK_V3"]


DEEPSEEK_V3 = with_defaults(
    ModelSpec(
        name="deepseek_v3",
        architectures=("DeepseekV3ForCausalLM",),
        transformer_config=config.transformer_config,
        model_options=config.model_options,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=lambda hf: with_experts(hf, config.expert_layers(hf), attention="latent"),
        unused_weights=next_token_layers,
        flops_per_token=config.flops_per_token,
        tiny=config.tiny,
    ),
    rms_norm_eps=1e-6,
    first_k_dense_replace=3,
    n_group=8,
    topk_group=4,
    max_position_embeddings=4096,
)
