"""The weight mapping of GLM-4.5V."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.models import WeightRule
from anygauge_models.architecture import next_token_layers
from anygauge_models.glm4_moe import weights as glm4_moe
from anygauge_models.glm4v.weights import DECODER, tower
from anygauge_models.glm4v_moe.config import decoder
from anygauge_models.rules import inside

__all__ = ["unused_weights", "weight_rules"]


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    return [*inside(DECODER, glm4_moe.weight_rules(decoder(hf))), *tower(hf)]


def unused_weights(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of the layers that predict tokens after the next."""
    return tuple(f"{DECODER}{each.removeprefix('model.')}" for each in next_token_layers(decoder(hf)))
