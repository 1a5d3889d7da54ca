"""The audio tower of Qwen3-Omni: transformers' module, and how it is fed.

A recording is cut into chunks of a second, which convolutions make shorter; attention is within windows of
some chunks. All chunks are filled up to a second, so that a recording's features are the same whatever it is
packed with. (transformers fills them up to the longest that is there.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from anygauge_hooks.media import Content, TowerSpec
from anygauge_hooks.megatron import WeightRule
from anygauge_models.qwen3_omni_moe.config import CHUNK, audio_of, flat, prefix
from anygauge_models.vision import module_fields, on_device, stack_rules, tensor_rules, with_biases

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from anygauge_hooks.media import Media

__all__ = ["features_of", "flops", "tower", "tower_rules"]

_TOWER = "audio_tower"
_LAYER = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")),
    *("self_attn_layer_norm", "final_layer_norm", "fc1", "fc2"),
)


def tower(hf: Mapping[str, Any]) -> TowerSpec:
    """Return the tower of sound."""
    return TowerSpec(
        name=_TOWER,
        kinds=frozenset(("audio",)),
        build=_build,
        inputs=_inputs,
        outputs=_outputs,
        blank=lambda hf: Content("audio", np.zeros((1, audio_of(flat(hf))["num_mel_bins"]), np.float32)),
        hf_prefixes=(f"{prefix(hf)}{_TOWER}.",),
    )


def features_of(frames: int) -> int:
    """Return how many features a recording of so many frames has."""
    whole, rest = divmod(frames, CHUNK)
    return whole * _shortened(CHUNK) + _shortened(rest)


def _shortened(frames: int) -> int:
    """Return what three convolutions leave, each of which takes every other frame."""
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames


def tower_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return the rules of the tower; its names in a thinker's checkpoint are canonical ones."""
    single = [
        "conv_out.weight",
        *with_biases("conv2d1", "conv2d2", "conv2d3", "ln_post", "proj1", "proj2"),
    ]
    layers = f"{_TOWER}.layers"
    return [
        *tensor_rules(_TOWER, _TOWER, single),
        *stack_rules(layers, layers, audio_of(hf)["encoder_layers"], with_biases(*_LAYER)),
    ]


def flops(hf: Mapping[str, Any], media: Media) -> float:
    """Return the floating-point operations of the tower's forward pass over one recording."""
    config = audio_of(hf)
    channels, hidden = config["downsample_hidden_size"], config["d_model"]
    bands, frames, inputs, convolved = config["num_mel_bins"], CHUNK, 1, 0
    for _ in range(3):
        bands, frames = (bands + 1) // 2, (frames + 1) // 2
        convolved += 9 * inputs * channels * bands * frames
        inputs = channels
    count = features_of(media.grid[0])
    window = min(count, _window(config))
    layer = 4 * hidden * hidden + 2 * hidden * config["encoder_ffn_dim"] + 2 * hidden * window
    ends = hidden * hidden + hidden * config["output_dim"]
    chunks = -(-media.grid[0] // CHUNK)
    projected = chunks * frames * bands * channels * hidden
    layers = count * (config["encoder_layers"] * layer + ends)
    return float(2 * (chunks * convolved + projected + layers))


def _window(config: Mapping[str, Any]) -> int:
    """Return how many features attend to one another."""
    return _shortened(CHUNK) * int(config["n_window_infer"] // CHUNK)


def _build(hf: Mapping[str, Any]) -> nn.Module:
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
        Qwen3OmniMoeAudioEncoderConfig,
    )
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

    config = Qwen3OmniMoeAudioEncoderConfig(**module_fields(audio_of(flat(hf))))
    module: nn.Module = Qwen3OmniMoeAudioEncoder(config)
    return module


def _inputs(hf: Mapping[str, Any], contents: Sequence[Content], device: torch.device) -> dict[str, Any]:
    import torch

    config = audio_of(flat(hf))
    window = _window(config)
    cut = [content.data[at : at + CHUNK] for content in contents for at in range(0, len(content.data), CHUNK)]
    padded = np.zeros((len(cut), config["num_mel_bins"], CHUNK), np.float32)
    for number, each in enumerate(cut):
        padded[number, :, : len(each)] = each.T
    most = _shortened(CHUNK)
    kept = [number * most + at for number, each in enumerate(cut) for at in range(_shortened(len(each)))]
    counts = [features_of(len(content.data)) for content in contents]
    lengths = [min(window, count - at) for count in counts for at in range(0, count, window)]
    return {
        "padded_feature": on_device(padded, device),
        "chunk_lengths": on_device([len(each) for each in cut], device),
        "valid_indices": on_device(kept, device),
        "cu_seqlens": on_device([0, *np.cumsum(lengths)], device, torch.int32),
        "max_seqlen": max(lengths),
        "lengths": tuple(lengths),
    }


def _outputs(output: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    return output.last_hidden_state, ()
