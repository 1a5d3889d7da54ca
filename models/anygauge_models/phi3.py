"""Phi-3 and Phi-4, dense, with one tensor for queries, keys and values (https://arxiv.org/abs/2412.08905)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.errors import ConfigError
from anygauge_models.architecture import Variant, head_size
from anygauge_models.dense import DenseDecoder
from anygauge_models.rope import rope_parameters, turning_part

__all__ = ["PHI3"]


def _refused(hf: Mapping[str, Any]) -> list[Variant]:
    """Refuse the window and the scaled angles with which published checkpoints do come."""
    # transformers reads every scaling of the family as longrope, or refuses it.
    if (kind := rope_parameters(hf)["rope_type"]) != "default":
        raise ConfigError(
            f"The checkpoint's rotary scaling {kind!r} is not supported by the phi3 family of Megatron, "
            "which needs none.",
            hint="Phi-4 and Phi-3-mini-4k have none. For Phi-4-mini and the 128k models of Phi-3, "
            'train.engine = "fsdp" builds the model of transformers.',
        )
    if (window := hf.get("sliding_window")) is not None:
        raise ConfigError(
            f"The checkpoint's sliding_window = {window!r} is not supported by the phi3 family, "
            "which needs null.",
            hint=f"Sequences of at most {window} tokens never reach the end of the window. For these, set "
            f"sliding_window to null and max_position_embeddings to {window} in config.json.",
        )
    return []


PHI3 = DenseDecoder(
    family="phi3",
    rotary_dim=lambda hf: turning_part(hf, head_size(hf), 1.0),
    refused=_refused,
    has_fused_qkv=True,
    has_fused_mlp=True,
).spec("Phi3ForCausalLM", num_key_value_heads=None, rms_norm_eps=1e-5, max_position_embeddings=4096)
