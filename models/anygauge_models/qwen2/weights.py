"""The weight mapping of Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.models import WeightRule
from anygauge_models.qwen2.config import attention_of
from anygauge_models.rules import decoder_rules, dense_mlp, self_attention

__all__ = ["weight_rules"]


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    attention = self_attention(**attention_of(hf), bias=True)
    return decoder_rules(hf, [*attention, *dense_mlp(hf["intermediate_size"])])
