"""Qwen3-VL with a mixture of experts (https://arxiv.org/abs/2511.21631)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.megatron import MegatronModel, WeightRule
from anygauge_hooks.models import ModelSpec
from anygauge_models import qwen3_moe
from anygauge_models.architecture import (
    CHATML,
    head_size,
    model_options,
    refuse_variants,
    tiny_config,
    with_defaults,
    with_experts,
)
from anygauge_models.qwen3_moe import attention_of, expert_layers, flops_per_token, num_experts
from anygauge_models.qwen3_vl.spec import DECODER, MEDIA
from anygauge_models.qwen3_vl.vision import tower_rules
from anygauge_models.rope import interleaved_rotary
from anygauge_models.rules import decoder_rules, dense_mlp, expert_mlp, inside, self_attention

__all__ = ["QWEN3_VL_MOE"]


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    hidden, width = hf["hidden_size"], hf["moe_intermediate_size"]
    normal = {"norm_topk_prob": True, **hf}
    square = ("moe_intermediate_size", hidden in (width, 2 * width), _OBLONG)
    refuse_variants(hf, "qwen3_vl_moe", [square, ("norm_topk_prob", not normal["norm_topk_prob"], "true")])
    return qwen3_moe.transformer_config(normal)


_OBLONG = "another than hidden_size or half of it: how the matrices of its stacks lie, their shape tells"


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


rotary = interleaved_rotary(head_size, (24, 20, 20), 500_000.0)


QWEN3_VL_MOE = with_defaults(
    ModelSpec(
        name="qwen3_vl_moe",
        architectures=("Qwen3VLMoeForConditionalGeneration",),
        model_options=model_options,
        flops_per_token=flops_per_token,
        tiny=tiny_config("qwen3_vl_moe"),
        assistant_turns=CHATML,
        media=MEDIA,
        engines={
            "megatron": MegatronModel(
                transformer_config=transformer_config,
                weight_rules=weight_rules,
                rotary=rotary,
                layers=lambda hf: with_experts(hf, expert_layers(hf)),
            )
        },
    ),
    num_key_value_heads=16,
    rms_norm_eps=1e-6,
    max_position_embeddings=128_000,
)
