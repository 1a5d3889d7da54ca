"""The family of Qwen2.5-VL, of images: the decoder of Qwen2.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anygauge_hooks.media import MediaSpec
from anygauge_hooks.megatron import MegatronModel, WeightRule
from anygauge_models.architecture import head_size, make_family, sliding_windows
from anygauge_models.dense import DenseDecoder
from anygauge_models.positions import frame_by_frame
from anygauge_models.qwen2_5_vl import vision
from anygauge_models.qwen2_5_vl.processor import make_processor
from anygauge_models.qwen3_vl.processor import forbidden
from anygauge_models.rope import half_rotary

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["QWEN2_5_VL"]

DENSE = DenseDecoder(family="qwen2_5_vl", refused=sliding_windows, has_bias=lambda hf: True)


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    return [*DENSE.weight_rules(hf), *vision.tower_rules(hf)]


def rotary(hf: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each position's angles.

    :param positions: ``[T]`` or ``[3, T]``, int64.
    :returns: Two ``[T, R]`` float32 tensors.
    """
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    return _rotary({**hf, key: {"mrope_section": [16, 24, 24], **(hf.get(key) or {})}}, positions)


_rotary = half_rotary(head_size)

QWEN2_5_VL = make_family(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    model=MegatronModel(
        transformer_config=DENSE.transformer_config,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=DENSE.layers,
    ),
    flops_per_token=DENSE.flops_per_token,
    media=MediaSpec(
        make_processor=make_processor,
        towers=vision.towers,
        positions=frame_by_frame,
        flops=vision.flops,
        forbidden=forbidden,
    ),
    # transformers 5.23 goes on after a video from its height and width, servers from its time too.
    refused_media="transformers and servers count the positions after a video differently",
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
    },
)
