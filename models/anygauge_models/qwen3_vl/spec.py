"""The family of Qwen3-VL's dense models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anygauge_hooks.media import MediaSpec
from anygauge_hooks.megatron import LayerKind, MegatronModel, WeightRule
from anygauge_models import qwen3
from anygauge_models.architecture import make_family
from anygauge_models.positions import frame_by_frame
from anygauge_models.qwen3_vl import vision
from anygauge_models.qwen3_vl.processor import forbidden, make_processor
from anygauge_models.qwen3_vl.vision import tower_rules
from anygauge_models.rope import interleaved_rotary
from anygauge_models.rules import inside

__all__ = ["DECODER", "MEDIA", "QWEN3_VL", "rotary"]

DENSE = replace(qwen3.DENSE, family="qwen3_vl")
DECODER = "model.language_model."
"""How the names of the decoder begin in checkpoints."""


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    return [*inside(DECODER, DENSE.weight_rules(hf)), *tower_rules(hf)]


rotary = interleaved_rotary(DENSE.head_dim, (24, 20, 20), 500_000.0)


MEDIA = MediaSpec(
    make_processor=make_processor,
    towers=vision.towers,
    positions=frame_by_frame,
    flops=vision.flops,
    forbidden=forbidden,
    served={"sglang": frozenset(("image", "video"))},
)

QWEN3_VL = make_family(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    model=MegatronModel(
        transformer_config=DENSE.transformer_config,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=lambda hf: (LayerKind(),) * hf["num_hidden_layers"],
    ),
    flops_per_token=DENSE.flops_per_token,
    media=MEDIA,
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 128_000},
)
