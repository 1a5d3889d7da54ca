"""The audio tower of GLM that sees and hears: GLM-ASR's encoder and projector, and how they are fed.

A recording is cut into windows, and the last one is filled up with silence, which the encoder hears too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from anygauge_hooks.media import Content, TowerSpec
from anygauge_hooks.megatron import WeightRule
from anygauge_hooks.models import text_config
from anygauge_models.audio import FRAME_RATE
from anygauge_models.glm_omni.config import JOINED, WINDOW, audio_of
from anygauge_models.vision import module_fields, stack_rules, tensor_rules, with_biases

if TYPE_CHECKING:
    import torch
    from torch import nn

    from anygauge_hooks.media import Media

__all__ = ["FEWEST", "features_of", "flops", "tower", "tower_rules", "window_of"]

FEWEST = JOINED * WINDOW - 1
"""Frames of a recording that has a feature."""
_TOWER = "audio_tower"
_ENCODER, _PROJECTOR = "model.audio_tower", "model.multi_modal_projector"
_LAYER = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.fc1", "mlp.fc2")
_NORMS = ("input_layernorm", "post_attention_layernorm")


def tower(hf: Mapping[str, Any]) -> TowerSpec:
    """Return the tower of sound."""
    return TowerSpec(
        name=_TOWER,
        kinds=frozenset(("audio",)),
        build=_build,
        inputs=_inputs,
        outputs=lambda features: (features, ()),
        blank=_blank,
        hf_prefixes=(f"{_ENCODER}.", f"{_PROJECTOR}."),
    )


def window_of(hf: Mapping[str, Any]) -> int:
    """Return how many frames a window has."""
    return WINDOW * int(audio_of(hf)["max_position_embeddings"])


def features_of(frames: int, window: int) -> int:
    """Return how many features a recording has: none of a last window that is shorter than one.

    :param frames: Frames of the recording.
    :param window: Frames of a window.
    """
    return sum(_windows(frames, window))


def _windows(frames: int, window: int) -> list[int]:
    """Return how many features each window of a recording has."""
    lengths = [min(window, frames - at) for at in range(0, frames, window)]
    return [(length + 1) // WINDOW // JOINED for length in lengths]


def tower_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return the rules of encoder and projector, which every rank of a first stage has whole."""
    layers = (f"{_TOWER}.encoder.layers", f"{_ENCODER}.layers")
    each = [*with_biases(*_LAYER, *_NORMS), "self_attn.k_proj.weight"]
    return [
        *tensor_rules(f"{_TOWER}.encoder", _ENCODER, with_biases("conv1", "conv2", "norm")),
        *stack_rules(*layers, audio_of(hf)["num_hidden_layers"], each),
        *tensor_rules(f"{_TOWER}.projector", _PROJECTOR, with_biases("linear_1", "linear_2")),
    ]


def flops(hf: Mapping[str, Any], media: Media) -> float:
    """Return the floating-point operations of the tower's forward pass over one recording."""
    audio, width = audio_of(hf), text_config(hf)["hidden_size"]
    hidden, inner, positions = (
        audio[key] for key in ("hidden_size", "intermediate_size", "max_position_embeddings")
    )
    heads = audio["num_attention_heads"]
    keys = hidden * (audio.get("num_key_value_heads") or heads) // heads
    frames, window = media.grid[0], window_of(hf)
    convolved = 3 * hidden * (WINDOW * audio["num_mel_bins"] + hidden)
    layer = 2 * hidden * (hidden + keys + inner + positions)
    encoded = -(-frames // window) * positions * (convolved + audio["num_hidden_layers"] * layer)
    projected = features_of(frames, window) * 2 * width * (inner + width)
    return float(2 * (encoded + projected))


def _blank(hf: Mapping[str, Any]) -> Content:
    data = np.zeros((window_of(hf), audio_of(hf)["num_mel_bins"]), np.float32)
    return Content("audio", data, FEWEST / FRAME_RATE)


def _build(hf: Mapping[str, Any]) -> nn.Module:
    from anygauge_models.glm_omni.audio_tower import AudioTower

    fields = module_fields(audio_of(hf))
    return AudioTower(fields, text_config(hf)["hidden_size"], hf.get("projector_hidden_act", "gelu"))


def _inputs(hf: Mapping[str, Any], contents: Sequence[Content], device: torch.device) -> dict[str, Any]:
    import torch

    window = window_of(hf)
    positions = window // WINDOW
    heard = np.concatenate([content.data.reshape(-1, window, content.data.shape[1]) for content in contents])
    counts = [
        count for content in contents for count in _windows(round(content.seconds * FRAME_RATE), window)
    ]
    kept = [number * (positions // JOINED) + at for number, count in enumerate(counts) for at in range(count)]
    return {
        "spectrum": torch.from_numpy(heard).to(device).transpose(1, 2),
        "kept": torch.tensor(kept, device=device),
        "lengths": (positions,) * len(counts),
    }
