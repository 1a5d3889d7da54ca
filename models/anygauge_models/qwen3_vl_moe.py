"""Qwen3-VL with a mixture of experts (https://arxiv.org/abs/2511.21631)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.megatron import MegatronModel, WeightRule
from anygauge_models import qwen3_moe
from anygauge_models.architecture import head_size, make_family, refuse_variants
from anygauge_models.qwen3_vl.spec import DECODER, MEDIA
from anygauge_models.qwen3_vl.vision import tower_rules
from anygauge_models.rope import interleaved_rotary
from anygauge_models.rules import inside

__all__ = ["QWEN3_VL_MOE"]


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    hidden, width = hf["hidden_size"], hf["moe_intermediate_size"]
    square = ("moe_intermediate_size", hidden in (width, 2 * width), _OBLONG)
    refuse_variants(hf, "qwen3_vl_moe", [square, ("norm_topk_prob", not hf["norm_topk_prob"], "true")])
    return qwen3_moe.transformer_config(hf)


_OBLONG = "another than hidden_size or half of it: how the matrices of its stacks lie, their shape tells"


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    layers = qwen3_moe.weight_rules(hf, stacked=True, transposed=True)
    return [*inside(DECODER, layers), *tower_rules(hf)]


rotary = interleaved_rotary(head_size, (24, 20, 20), 500_000.0)


QWEN3_VL_MOE = make_family(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    model=MegatronModel(
        transformer_config=transformer_config,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=qwen3_moe.layers,
    ),
    flops_per_token=qwen3_moe.flops_per_token,
    media=MEDIA,
    defaults={
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128_000,
        "norm_topk_prob": True,
    },
)
