"""Images and video of Qwen3.5: Qwen3-VL's tower without deepstack, and its processor with other tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge_hooks.media import Media, TowerSpec
from anygauge_hooks.megatron import WeightRule
from anygauge_models.qwen3_5.config import placeholders
from anygauge_models.qwen3_vl import vision
from anygauge_models.qwen3_vl.processor import processor_with
from anygauge_models.vision import module_fields

if TYPE_CHECKING:
    from torch import nn

    from anygauge_hooks.media import MediaProcessor

__all__ = ["flops", "make_processor", "tower_rules", "towers"]


def towers(hf: Mapping[str, Any]) -> tuple[TowerSpec, ...]:
    """Return the tower, if the model has one."""
    if "vision_config" not in hf:
        return ()
    return tuple(replace(tower, build=_build, levels=_no_levels) for tower in vision.towers(hf))


def _no_levels(hf: Mapping[str, Any]) -> int:
    return 0


def _build(hf: Mapping[str, Any]) -> nn.Module:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    fields = module_fields(vision.vision_of(hf))
    del fields["deepstack_visual_indexes"]
    tower: nn.Module = Qwen3_5VisionModel(Qwen3_5VisionConfig(**fields))
    return tower


def tower_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return the rules of the tower, if the model has one."""
    return vision.tower_rules(hf, _no_levels) if "vision_config" in hf else []


def flops(hf: Mapping[str, Any], media: Media) -> float:
    """Return the floating-point operations of the tower's forward pass over one image or video."""
    return vision.flops(hf, media, _no_levels)


def make_processor(directory: Path, hf: Mapping[str, Any]) -> MediaProcessor:
    """Return the processor of a model.

    :raises ConfigError: Its settings are another family's.
    """
    return processor_with(directory, hf, "qwen3_5", placeholders(hf))
