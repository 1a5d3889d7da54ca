"""The family of Qwen3.5's dense models, of text alone and beside a vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.media import MediaSpec
from anygauge_hooks.models import LayerKind, ModelSpec
from anygauge_models.architecture import CHATML, with_defaults
from anygauge_models.positions import frame_by_frame
from anygauge_models.qwen3_5 import config, vision
from anygauge_models.qwen3_5.processor import make_processor
from anygauge_models.qwen3_5.rotary import rotary
from anygauge_models.qwen3_5.weights import weight_rules

__all__ = ["MEDIA", "QWEN3_5"]

MEDIA = MediaSpec(
    make_processor=make_processor,
    towers=vision.towers,
    positions=frame_by_frame,
    flops=vision.flops,
    forbidden=config.forbidden,
)


def _layers(hf: Mapping[str, Any]) -> list[LayerKind]:
    return [LayerKind(attention="gated_delta" if linear else "gated") for linear in config.is_linear(hf)]


QWEN3_5 = with_defaults(
    ModelSpec(
        name="qwen3_5",
        architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
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
    num_key_value_heads=4,
    rms_norm_eps=1e-6,
    max_position_embeddings=32_768,
)
