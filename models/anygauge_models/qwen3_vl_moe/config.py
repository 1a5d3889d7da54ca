"""From the Hugging Face config of Qwen3-VL's mixtures of experts to Megatron's. The decoder is Qwen3's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_models.architecture import model_options, refuse_variants
from anygauge_models.qwen3_moe import config as qwen3_moe
from anygauge_models.qwen3_moe.config import expert_layers, flops_per_token
from anygauge_models.qwen3_vl.config import tiny_text, tiny_tokens, tiny_vision

__all__ = [
    "expert_layers",
    "flops_per_token",
    "model_options",
    "tiny",
    "transformer_config",
]


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


def tiny() -> dict[str, Any]:
    """Return a config that trains on a laptop in seconds; its first layer is dense."""
    return {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "text_config": {
            "model_type": "qwen3_vl_moe_text",
            "intermediate_size": 96,
            "moe_intermediate_size": 40,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0],
            **tiny_text(),
        },
        "vision_config": {
            "model_type": "qwen3_vl_moe_vision",
            "deepstack_visual_indexes": [0, 1],
            **tiny_vision(),
        },
        "tie_word_embeddings": False,
        **tiny_tokens(),
    }
