"""Mistral, dense, without a sliding window (https://arxiv.org/abs/2310.06825)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.errors import ConfigError
from anygauge_models.architecture import Variant
from anygauge_models.dense import DenseDecoder

__all__ = ["MISTRAL"]

_WINDOW = 4096
"""Default of transformers for configs without a window."""


def _refused(hf: Mapping[str, Any]) -> list[Variant]:
    """Refuse the window of version 0.1, with which published checkpoints do come."""
    if (window := hf.get("sliding_window", _WINDOW)) is not None:
        raise ConfigError(
            f"The checkpoint's sliding_window = {window!r} is not supported by the mistral family, "
            "which needs null.",
            hint=f"Sequences of at most {window} tokens never reach the end of the window. For these, set "
            f"sliding_window to null and max_position_embeddings to {window} in config.json.",
        )
    return []


MISTRAL = DenseDecoder(family="mistral", refused=_refused).spec(
    "MistralForCausalLM",
    num_key_value_heads=8,
    rms_norm_eps=1e-6,
    max_position_embeddings=131_072,
)
