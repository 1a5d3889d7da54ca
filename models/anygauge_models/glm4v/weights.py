"""The weight mapping of GLM-4.1V."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.models import WeightRule
from anygauge_models.glm4 import weights as glm4
from anygauge_models.glm4v.config import decoder, vision_of
from anygauge_models.rules import inside
from anygauge_models.vision import stack_rules, tensor_rules, with_biases

__all__ = ["DECODER", "HF_TOWER", "TOWER", "tower", "weight_rules"]

DECODER = "model.language_model."
"""How the decoder's names begin in checkpoints."""
TOWER, HF_TOWER = "visual", "model.visual"
"""How the tower's names begin, canonical and in checkpoints."""
_BLOCK = ("norm1", "norm2", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_MERGER = ("proj", "gate_proj", "up_proj", "down_proj")


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    return [*inside(DECODER, glm4.weight_rules(decoder(hf))), *tower(hf)]


def tower(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return the rules of the vision tower, which every rank of a first stage has whole."""
    vision = vision_of(hf)
    qkv = with_biases("attn.qkv") if vision.get("attention_bias") else ["attn.qkv.weight"]
    names = [
        "embeddings.position_embedding.weight",
        *with_biases("patch_embed.proj", "downsample", "merger.post_projection_norm"),
        *(f"{name}.weight" for name in ("post_conv_layernorm", "post_layernorm")),
        *(f"merger.{name}.weight" for name in _MERGER),
    ]
    return [
        *tensor_rules(TOWER, HF_TOWER, names),
        *stack_rules(
            f"{TOWER}.blocks",
            f"{HF_TOWER}.blocks",
            vision["depth"],
            [*qkv, *(f"{name}.weight" for name in _BLOCK)],
        ),
    ]
