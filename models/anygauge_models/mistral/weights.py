"""The weight mapping of Mistral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.models import WeightRule
from anygauge_models.mistral.config import attention_of
from anygauge_models.rules import decoder_rules, dense_mlp, self_attention

__all__ = ["weight_rules"]


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    return decoder_rules(hf, [*self_attention(**attention_of(hf)), *dense_mlp(hf["intermediate_size"])])
