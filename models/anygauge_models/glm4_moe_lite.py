"""GLM-4.7-Flash, with the layers of DeepSeek-V3 (https://huggingface.co/zai-org/GLM-4.7-Flash)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anygauge_models.architecture import make_family, next_token_layers, unsupported
from anygauge_models.deepseek_v3 import MODEL, expert_layers, flops_per_token, latent_config

__all__ = ["GLM4_MOE_LITE"]

_FAMILY = "glm4_moe_lite"
_KEY = "mlp_layer_types"
"""Kind of each layer's MLP; older configs have ``first_k_dense_replace`` alone."""


def _transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    sparse = len(expert_layers(hf))
    kinds = ["dense"] * (hf["num_hidden_layers"] - sparse) + ["sparse"] * sparse
    if hf.get(_KEY) not in (None, kinds):
        raise unsupported(_FAMILY, _KEY, hf[_KEY], f"experts after {len(kinds) - sparse} dense layers")
    return latent_config(hf, _FAMILY)


GLM4_MOE_LITE = make_family(
    _FAMILY,
    "Glm4MoeLiteForCausalLM",
    model=replace(MODEL, transformer_config=_transformer_config),
    flops_per_token=flops_per_token,
    unused_weights=next_token_layers,
    defaults={
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "max_position_embeddings": 202_752,
    },
)
