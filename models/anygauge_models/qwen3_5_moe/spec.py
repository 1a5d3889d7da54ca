"""The family of Qwen3.5's mixtures of experts, of text alone and beside a vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.models import LayerKind, ModelSpec
from anygauge_models.architecture import CHATML, with_defaults
from anygauge_models.qwen3_5.spec import MEDIA
from anygauge_models.qwen3_5_moe import config
from anygauge_models.qwen3_5_moe.rotary import rotary
from anygauge_models.qwen3_5_moe.weights import weight_rules

__all__ = ["QWEN3_5_MOE"]


def _layers(hf: Mapping[str, Any]) -> list[LayerKind]:
    return [
        LayerKind(attention="gated_delta" if linear else "gated", mlp="moe")
        for linear in config.is_linear(hf)
    ]


QWEN3_5_MOE = with_defaults(
    ModelSpec(
        name="qwen3_5_moe",
        architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        transformer_config=config.transformer_config,
        model_options=config.model_options,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=_layers,
        unused_weights=config.unused_weights,
        flops_per_token=config.flops_per_token,
        tiny=config.tiny,
        assistant_turns=CHATML,
        media=MEDIA,
    ),
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    max_position_embeddings=32_768,
)
