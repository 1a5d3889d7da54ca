"""Qwen3 with a mixture of experts (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.megatron import LayerKind, MegatronModel, WeightRule
from anygauge_models.architecture import (
    attention_flops,
    attention_sizes,
    decoder_config,
    expert_config,
    head_size,
    make_family,
    refuse_variants,
    single_expert,
    sparse_flops,
    with_experts,
)
from anygauge_models.qwen3 import DENSE
from anygauge_models.rope import half_rotary
from anygauge_models.rules import decoder_rules, dense_mlp, expert_mlp, self_attention

__all__ = [
    "QWEN3_MOE",
    "flops_per_token",
    "layers",
    "transformer_config",
    "weight_rules",
]


def attention_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return query heads, groups of them, and the size of a head."""
    return attention_sizes(hf, head_size(hf))


def num_experts(hf: Mapping[str, Any]) -> int:
    """Return the number of experts, under the name of either version of transformers."""
    return int(hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"])


def expert_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers whose MLP is a mixture of experts."""
    dense, step = hf.get("mlp_only_layers") or (), hf.get("decoder_sparse_step", 1)
    return tuple(i for i in range(hf["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    dense = ("mlp_only_layers", not expert_layers(hf), "a layer of experts")
    is_normal = bool(hf.get("norm_topk_prob", False))
    refuse_variants(hf, "qwen3_moe", [*DENSE.refused(hf), dense, *([single_expert(hf)] if is_normal else [])])
    experts = expert_config(
        experts=num_experts(hf),
        top_k=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        # A softmax over the chosen experts is one over all of them, made to sum to 1 again.
        moe_router_pre_softmax=not is_normal,
    )
    return decoder_config(hf, **attention_of(hf), qk_layernorm=True, **experts)


def flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Return the floating-point operations of a forward pass per token, causal attention counted once."""
    width = hf["num_experts_per_tok"] * hf["moe_intermediate_size"]
    attention = attention_flops(hf["hidden_size"], **attention_of(hf), sequence_length=sequence_length)
    return sparse_flops(hf, attention, sparse=len(expert_layers(hf)), width=width, experts=num_experts(hf))


def weight_rules(hf: Mapping[str, Any], **stacks: Any) -> list[WeightRule]:
    """Return one rule for each canonical tensor.

    :param stacks: How checkpoints hold the experts; see :func:`expert_mlp`.
    """
    sparse = expert_layers(hf)
    dense = tuple(sorted(set(range(hf["num_hidden_layers"])) - set(sparse)))
    return decoder_rules(
        hf,
        [
            *self_attention(**attention_of(hf), qk_norm=True),
            *dense_mlp(hf["intermediate_size"], layers=dense),
            *expert_mlp(experts=num_experts(hf), width=hf["moe_intermediate_size"], layers=sparse, **stacks),
        ],
    )


def layers(hf: Mapping[str, Any]) -> list[LayerKind]:
    """Return the kind of each layer."""
    return with_experts(hf, expert_layers(hf))


rotary = half_rotary(head_size)


QWEN3_MOE = make_family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    model=MegatronModel(
        transformer_config=transformer_config,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=layers,
    ),
    flops_per_token=flops_per_token,
    defaults={"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768},
)
