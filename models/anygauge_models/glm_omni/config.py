"""From the config of GLM that sees and hears to Megatron's. ``text_config`` says which decoder it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.errors import ConfigError
from anygauge_hooks.megatron import MegatronModel, megatron_model
from anygauge_hooks.models import ModelSpec
from anygauge_models.glm4v.spec import GLM4V
from anygauge_models.glm4v_moe import GLM4V_MOE

__all__ = [
    "JOINED",
    "WINDOW",
    "audio_of",
    "decoder_family",
    "decoder_model",
    "flops_per_token",
    "forbidden",
    "model_options",
    "token_of",
    "transformer_config",
]

_DECODERS: Mapping[str, ModelSpec] = {"glm4v_text": GLM4V, "glm4v_moe_text": GLM4V_MOE}
_AUDIO = {
    "num_mel_bins": 128,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "max_position_embeddings": 1500,
}
"""Those of GLM-ASR in transformers."""
JOINED = 4
"""Outputs of the audio encoder that become one feature."""
WINDOW = 2
"""Frames of a window for each position of the audio encoder."""


def decoder_family(hf: Mapping[str, Any]) -> ModelSpec:
    """Return the family whose decoder the model has, and whose vision tower.

    :raises ConfigError: There is none.
    """
    kind = hf["text_config"].get("model_type")
    if kind not in _DECODERS:
        raise ConfigError(
            f"The checkpoint's text_config.model_type = {kind!r} is not supported by the glm_omni family, "
            f"which needs {' or '.join(_DECODERS)}.",
            hint="docs/glm_omni.md describes config.json.",
        )
    return _DECODERS[kind]


def decoder_model(hf: Mapping[str, Any]) -> MegatronModel:
    """Return how Megatron builds that decoder."""
    return megatron_model(decoder_family(hf))


def audio_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the audio encoder, with the defaults of ``transformers``."""
    return {**_AUDIO, **hf["audio_config"]}


def token_of(hf: Mapping[str, Any], kind: str) -> int:
    """Return the token that the template writes for a kind.

    :raises KeyError: The config does not say it, as it must.
    """
    return int(hf[f"{kind}_token_id"])


def forbidden(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that hold places."""
    return tuple(token_of(hf, kind) for kind in ("image", "video", "audio"))


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    audio = audio_of(hf)
    positions, hidden, joined = (
        audio[key] for key in ("max_position_embeddings", "hidden_size", "intermediate_size")
    )
    if positions % JOINED or joined != JOINED * hidden:
        raise ConfigError(
            f"The checkpoint's audio_config has {positions} positions, hidden_size {hidden} and "
            f"intermediate_size {joined}, and {JOINED} outputs of its encoder become one feature.",
            hint=f"max_position_embeddings is a multiple of {JOINED}, and intermediate_size {JOINED} times "
            "hidden_size.",
        )
    return dict(decoder_model(hf).transformer_config(hf))


def model_options(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return vocabulary size, longest sequence, and whether the embeddings are tied."""
    return dict(decoder_family(hf).model_options(hf))


def flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Return the floating-point operations of a forward pass per token, causal attention counted once."""
    return decoder_family(hf).flops_per_token(hf, sequence_length)
