"""OLMo 2 and 3, dense, with norms after attention and MLP alone (https://arxiv.org/abs/2501.00656)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anygauge_models.architecture import layer_windows
from anygauge_models.dense import DenseDecoder
from anygauge_models.rope import of_layer_type

__all__ = ["OLMO2", "OLMO3"]

_THETA = 500_000.0
"""Default base of the angles of OLMo 3 in transformers."""


def _layer_type(hf: Mapping[str, Any], kind: str) -> dict[str, Any]:
    # As transformers has it: a base that is a key of the config itself is not of layers with a window.
    base = hf.get("rope_theta", _THETA) if kind == "full_attention" else _THETA
    return of_layer_type(hf, kind, base)


_OLMO2 = DenseDecoder(
    family="olmo2",
    refused=lambda hf: [("attention_bias", bool(hf.get("attention_bias")), "false")],
    has_wide_qk_norm=True,
    has_pre_norms=False,
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
_OLMO3 = replace(_OLMO2, family="olmo3", windows=lambda hf: layer_windows(hf, 4), layer_type=_layer_type)
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}

OLMO2 = _OLMO2.spec("Olmo2ForCausalLM", **_DEFAULTS)
OLMO3 = _OLMO3.spec("Olmo3ForCausalLM", sliding_window=4096, **_DEFAULTS)
