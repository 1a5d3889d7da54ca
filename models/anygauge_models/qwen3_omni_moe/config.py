"""From the Hugging Face config of Qwen3-Omni's thinker to Megatron's. The decoder is Qwen3's, with experts.

Functions take the config of the thinker flat, as :func:`flat` returns it: published directories say it under
``thinker_config``, and a thinker that was saved alone at the top.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.models import text_config
from anygauge_models import qwen3_moe
from anygauge_models.architecture import unsupported

__all__ = [
    "CHUNK",
    "audio_of",
    "flat",
    "forbidden",
    "per_second",
    "prefix",
    "token_of",
    "transformer_config",
]

_TOKENS = {"image": 151_655, "video": 151_656, "audio": 151_646}
"""Defaults of transformers for configs without these tokens."""
_AUDIO = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "n_window": 50,
    "n_window_infer": 800,
    "output_dim": 3584,
    "downsample_hidden_size": 480,
}
_WINDOW = 50
"""Half of the frames of a chunk."""
CHUNK = 2 * _WINDOW
"""Frames that convolutions see together."""


def flat(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the thinker with that of its decoder at the top."""
    return {"norm_topk_prob": True, **text_config(hf)}


def prefix(hf: Mapping[str, Any]) -> str:
    """Return what stands before the names of the thinker in checkpoints."""
    return "thinker." if "thinker_config" in hf else ""


def audio_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the audio tower, with the defaults of ``transformers``."""
    return {**_AUDIO, **hf["audio_config"]}


def token_of(hf: Mapping[str, Any], kind: str) -> int:
    """Return the token that holds the place of a kind's features."""
    return int(hf.get(f"{kind}_token_id", _TOKENS[kind]))


def forbidden(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that hold places."""
    return tuple(token_of(hf, kind) for kind in _TOKENS)


def per_second(hf: Mapping[str, Any]) -> int:
    """Return by how much the position in time grows in a second of video."""
    return int(hf.get("position_id_per_seconds", 25))


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    if (window := audio_of(hf)["n_window"]) != _WINDOW:
        raise unsupported("qwen3_omni_moe", "audio_config.n_window", window, _WINDOW)
    return qwen3_moe.transformer_config(hf)
