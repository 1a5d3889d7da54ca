"""The vision tower of Qwen3-Omni: that of Qwen3-VL, under other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anygauge_hooks.media import TowerSpec
from anygauge_hooks.megatron import WeightRule
from anygauge_models.qwen3_omni_moe.config import flat, prefix
from anygauge_models.qwen3_vl import vision as qwen3_vl
from anygauge_models.qwen3_vl.vision import BLOCK, TOWER, flops, levels, outputs, vision_of
from anygauge_models.vision import module_fields, stack_rules, tensor_rules, with_biases

if TYPE_CHECKING:
    from torch import nn

__all__ = ["flops", "tower", "tower_rules"]

_MERGER = ("ln_q", "mlp.0", "mlp.2")


def tower(hf: Mapping[str, Any]) -> TowerSpec:
    """Return the tower of images and video."""
    return TowerSpec(
        name=TOWER,
        kinds=frozenset(("image", "video")),
        build=_build,
        inputs=lambda hf, *rest: qwen3_vl.inputs(flat(hf), *rest),
        outputs=outputs,
        blank=lambda hf: qwen3_vl.blank(flat(hf)),
        levels=lambda hf: levels(flat(hf)),
        hf_prefixes=(f"{prefix(hf)}{TOWER}.",),
    )


def _build(hf: Mapping[str, Any]) -> nn.Module:
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
        Qwen3OmniMoeVisionEncoderConfig,
    )
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder

    config = Qwen3OmniMoeVisionEncoderConfig(**module_fields(vision_of(flat(hf))))
    module: nn.Module = Qwen3OmniMoeVisionEncoder(config)
    return module


def tower_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return the rules of the tower; its names in a thinker's checkpoint are canonical ones."""
    single = ["pos_embed.weight", *with_biases("patch_embed.proj", *(f"merger.{x}" for x in _MERGER))]
    blocks, mergers = f"{TOWER}.blocks", f"{TOWER}.merger_list"
    return [
        *tensor_rules(TOWER, TOWER, single),
        *stack_rules(blocks, blocks, vision_of(hf)["depth"], with_biases(*BLOCK)),
        *stack_rules(mergers, mergers, levels(hf), with_biases(*_MERGER)),
    ]
