"""The weight mapping of the text models of Qwen3.5's mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.models import WeightRule
from anygauge_models.qwen3_5.config import with_vision
from anygauge_models.qwen3_5.weights import mixing_rules, placed
from anygauge_models.rules import decoder_rules, expert_mlp, shared_expert

__all__ = ["weight_rules"]


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    # Published models, which all see, have stacks; transformers 5 writes text models one expert at a time.
    experts = expert_mlp(
        experts=hf["num_experts"], width=hf["moe_intermediate_size"], stacked=with_vision(hf)
    )
    shared = shared_expert(
        "shared_expert", hf["shared_expert_intermediate_size"], gate="shared_expert_gate.weight"
    )
    return placed(hf, decoder_rules(hf, [*mixing_rules(hf), *experts, *shared]))
