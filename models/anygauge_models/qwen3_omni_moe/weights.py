"""The weight mapping of Qwen3-Omni's thinker; its decoder's names are those of Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anygauge_hooks.models import WeightRule
from anygauge_models.qwen3_moe import weights as qwen3_moe
from anygauge_models.qwen3_omni_moe import audio, vision
from anygauge_models.qwen3_omni_moe.config import prefix

__all__ = ["unused_weights", "weight_rules"]


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    before = prefix(hf)
    rules = [*qwen3_moe.weight_rules(hf), *vision.tower_rules(hf), *audio.tower_rules(hf)]
    return [replace(rule, hf=tuple(f"{before}{name}" for name in rule.hf)) for rule in rules]


def unused_weights(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of the parts that speak."""
    return ("talker.", "code2wav.") if prefix(hf) else ()
