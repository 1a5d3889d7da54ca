"""The weight mapping of Qwen3-VL's mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.models import WeightRule
from anygauge_models.qwen3_moe.config import attention_of, expert_layers, num_experts
from anygauge_models.qwen3_vl.vision import tower_rules
from anygauge_models.qwen3_vl.weights import DECODER
from anygauge_models.rules import decoder_rules, dense_mlp, expert_mlp, inside, self_attention

__all__ = ["weight_rules"]


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    sparse = expert_layers(hf)
    dense = tuple(sorted(set(range(hf["num_hidden_layers"])) - set(sparse)))
    stacks = expert_mlp(
        experts=num_experts(hf),
        width=hf["moe_intermediate_size"],
        stacked=True,
        transposed=True,
        layers=sparse,
    )
    layers = [
        *self_attention(**attention_of(hf), qk_norm=True),
        *dense_mlp(hf["intermediate_size"], layers=dense),
        *stacks,
    ]
    return [*inside(DECODER, decoder_rules(hf, layers)), *tower_rules(hf)]
