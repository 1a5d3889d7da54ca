"""Qwen3.5 with a mixture of experts, of text alone and beside a vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.megatron import LayerKind, MegatronModel, WeightRule
from anygauge_models.architecture import (
    expert_config,
    gated_mlp_flops,
    make_family,
    refuse_variants,
    single_expert,
)
from anygauge_models.qwen3_5.config import (
    hybrid_config,
    is_linear,
    mixing_flops,
    refused,
    unused_weights,
    with_vision,
)
from anygauge_models.qwen3_5.spec import MEDIA, mixing_rules, placed, rotary
from anygauge_models.rules import decoder_rules, expert_mlp, shared_expert

__all__ = ["QWEN3_5_MOE"]


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    refuse_variants(hf, "qwen3_5_moe", [*refused(hf), single_expert(hf)])
    shared = hf["shared_expert_intermediate_size"]
    experts = expert_config(
        experts=hf["num_experts"],
        top_k=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        moe_shared_expert_intermediate_size=shared,
        moe_shared_expert_gate=True,
    )
    # No layer is dense; Megatron wants a width for one all the same.
    return hybrid_config({**hf, "intermediate_size": shared}, **experts)


def flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Return the floating-point operations of a forward pass per token, causal attention counted once."""
    hidden = hf["hidden_size"]
    routed = hf["num_experts_per_tok"] * hf["moe_intermediate_size"]
    experts = gated_mlp_flops(hidden, routed + hf["shared_expert_intermediate_size"])
    gates = 2 * hidden * (hf["num_experts"] + 1)
    mlps = hf["num_hidden_layers"] * (experts + gates)
    return float(mixing_flops(hf, sequence_length) + mlps + 2 * hidden * hf["vocab_size"])


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


def _layers(hf: Mapping[str, Any]) -> list[LayerKind]:
    return [LayerKind(attention="gated_delta" if linear else "gated", mlp="moe") for linear in is_linear(hf)]


QWEN3_5_MOE = make_family(
    "qwen3_5_moe",
    *("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    model=MegatronModel(
        transformer_config=transformer_config,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=_layers,
    ),
    flops_per_token=flops_per_token,
    unused_weights=unused_weights,
    media=MEDIA,
    defaults={"num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768},
)
