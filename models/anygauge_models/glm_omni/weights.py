"""The weight mapping of GLM that sees and hears; everything is inside ``language_model``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anygauge_hooks.models import WeightRule
from anygauge_models.glm_omni.audio import tower_rules
from anygauge_models.glm_omni.config import decoder_family

__all__ = ["OWNER", "unused_weights", "weight_rules"]

OWNER = "language_model"
"""The part of the model that has its output layer."""


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    rules = [*decoder_family(hf).weight_rules(hf), *tower_rules(hf)]
    return [replace(rule, canonical=f"{OWNER}.{rule.canonical}") for rule in rules]


def unused_weights(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of the layers that predict tokens after the next."""
    return tuple(decoder_family(hf).unused_weights(hf))
