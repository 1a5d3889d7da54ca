"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, and experts (https://huggingface.co/Qwen).

Its layers are those of Qwen3.5, whose checkpoints hold the projections of delta nets otherwise.
"""

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
from anygauge_models.qwen3_5.config import hybrid_config, is_linear, mixing_flops, refused, rotary_dim
from anygauge_models.qwen3_5.spec import mixing_rules
from anygauge_models.qwen3_moe import expert_layers
from anygauge_models.rope import half_rotary
from anygauge_models.rules import decoder_rules, dense_mlp, expert_mlp, shared_expert

__all__ = ["QWEN3_NEXT"]


def _transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    is_normal = bool(hf["norm_topk_prob"])
    dense = ("mlp_only_layers", not expert_layers(hf), "a layer of experts")
    refuse_variants(hf, "qwen3_next", [*refused(hf), dense, *([single_expert(hf)] if is_normal else [])])
    experts = expert_config(
        experts=hf["num_experts"],
        top_k=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        moe_shared_expert_intermediate_size=hf["shared_expert_intermediate_size"],
        moe_shared_expert_gate=True,
        moe_router_pre_softmax=not is_normal,
    )
    return hybrid_config(hf, **experts)


def _flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    hidden, sparse = hf["hidden_size"], len(expert_layers(hf))
    routed = hf["num_experts_per_tok"] * hf["moe_intermediate_size"]
    experts = gated_mlp_flops(hidden, routed + hf["shared_expert_intermediate_size"])
    gates = 2 * hidden * (hf["num_experts"] + 1)
    dense = (hf["num_hidden_layers"] - sparse) * gated_mlp_flops(hidden, hf["intermediate_size"])
    mlps = sparse * (experts + gates) + dense
    return float(mixing_flops(hf, sequence_length) + mlps + 2 * hidden * hf["vocab_size"])


def _weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    sparse = expert_layers(hf)
    dense = tuple(sorted(set(range(hf["num_hidden_layers"])) - set(sparse)))
    shared: dict[str, Any] = {"gate": "shared_expert_gate.weight", "layers": sparse}
    return decoder_rules(
        hf,
        [
            *mixing_rules(hf, by_heads=True),
            *dense_mlp(hf["intermediate_size"], layers=dense),
            *expert_mlp(experts=hf["num_experts"], width=hf["moe_intermediate_size"], layers=sparse),
            *shared_expert("shared_expert", hf["shared_expert_intermediate_size"], **shared),
        ],
    )


def _layers(hf: Mapping[str, Any]) -> list[LayerKind]:
    sparse = expert_layers(hf)
    return [
        LayerKind(attention="gated_delta" if linear else "gated", mlp="moe" if layer in sparse else "dense")
        for layer, linear in enumerate(is_linear(hf))
    ]


QWEN3_NEXT = make_family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    model=MegatronModel(
        transformer_config=_transformer_config,
        weight_rules=_weight_rules,
        rotary=half_rotary(rotary_dim),
        layers=_layers,
    ),
    flops_per_token=_flops_per_token,
    unused_weights=lambda hf: ("mtp.",),
    defaults={
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "norm_topk_prob": True,
        "max_position_embeddings": 32_768,
    },
)
