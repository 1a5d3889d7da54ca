"""The weight mapping of Qwen3-VL: that of Qwen3 beside that of its tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.models import WeightRule
from anygauge_models.qwen3.weights import weight_rules as decoder_of
from anygauge_models.qwen3_vl.vision import tower_rules
from anygauge_models.rules import inside

__all__ = ["DECODER", "weight_rules"]

DECODER = "model.language_model."
"""How the names of the decoder begin in checkpoints."""


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    return [*inside(DECODER, decoder_of(hf)), *tower_rules(hf)]
