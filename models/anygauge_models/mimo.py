"""MiMo-7B: Qwen2 with layers that predict the token after the next (https://arxiv.org/abs/2505.07608)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anygauge_hooks.models import TransformersModel
from anygauge_models.architecture import sliding_windows
from anygauge_models.dense import DenseDecoder

if TYPE_CHECKING:
    import torch

__all__ = ["MIMO"]

_MTP = "model.mtp_layers."
"""Prefix of the layers that predict the token after the next. Nothing here runs them."""
_NOT_QWEN2 = ("architectures", "auto_map", "model_type", "num_nextn_predict_layers")


def _build(hf: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return the model of transformers; the class in the published files is Qwen2's with the other layers."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(**{key: value for key, value in hf.items() if key not in _NOT_QWEN2})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model._keys_to_ignore_on_load_unexpected = [rf"^{_MTP}"]
    return model


_DECODER = DenseDecoder(family="mimo", refused=sliding_windows, has_bias=lambda hf: True).spec(
    "MiMoForCausalLM", num_key_value_heads=32, rms_norm_eps=1e-6, max_position_embeddings=32_768
)
MIMO = replace(
    _DECODER,
    unused_weights=lambda hf: (_MTP,),
    engines={**_DECODER.engines, "transformers": TransformersModel(build=_build)},
)
