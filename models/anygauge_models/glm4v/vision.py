"""The vision tower of GLM-4.1V: transformers' module, and how it is fed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from anygauge_hooks.media import TowerSpec
from anygauge_hooks.megatron import WeightRule
from anygauge_models.glm4v.config import vision_of
from anygauge_models.vision import (
    blank_image,
    grid_of,
    module_fields,
    on_device,
    packed_patches,
    patch_of,
    patch_places,
    stack_rules,
    tensor_rules,
    tower_flops,
    with_biases,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from anygauge_hooks.media import Content, Media

__all__ = ["IMAGE_DEVIATION", "IMAGE_MEAN", "flops", "tower_rules", "towers"]

IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
"""Standard deviation of red, green and blue, from 0 to 1, in the images that CLIP was trained on
(https://arxiv.org/abs/2103.00020)."""
_TOWER, _HF_TOWER = "visual", "model.visual"
"""How the tower's names begin, canonical and in checkpoints."""
_BLOCK = ("norm1", "norm2", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_MERGER = ("proj", "gate_proj", "up_proj", "down_proj")


def towers(hf: Mapping[str, Any], *, model_type: str = "glm4v_vision") -> tuple[TowerSpec, ...]:
    """Return the tower of images and video.

    :param model_type: Type of the module in transformers.
    """
    tower = TowerSpec(
        name=_TOWER,
        kinds=frozenset({"image", "video"}),
        build=partial(_build, model_type),
        inputs=_inputs,
        outputs=_outputs,
        blank=lambda hf: blank_image(*patch_of(vision_of(hf))[:2]),
        hf_prefixes=(f"{_HF_TOWER}.",),
    )
    return (tower,)


def flops(hf: Mapping[str, Any], media: Media) -> float:
    """Return the floating-point operations of the tower's forward pass over one image or video."""
    vision = vision_of(hf)
    patch, merge, temporal = patch_of(vision)
    hidden, width = vision["hidden_size"], vision["out_hidden_size"]
    downsample = merge * merge * hidden * width
    merger = width * width + 3 * width * vision["intermediate_size"]
    return tower_flops(
        media,
        hidden=hidden,
        width=width,
        depth=vision["depth"],
        gates=2,
        inputs=3 * temporal * patch * patch,
        features=(downsample + merger) / (merge * merge),
    )


def _build(model_type: str, hf: Mapping[str, Any]) -> nn.Module:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(model_type, **module_fields(vision_of(hf)))
    module: nn.Module = AutoModel.from_config(config)
    return module


def _inputs(hf: Mapping[str, Any], contents: Sequence[Content], device: torch.device) -> dict[str, Any]:
    import torch

    sizes = patch_of(vision_of(hf))
    # Attention stays within a frame, so that the frames of a video are as many images.
    frames = [
        (height, width)
        for content in contents
        for time, height, width in [grid_of(content, sizes)]
        for _ in range(time)
    ]
    places = np.concatenate([patch_places(height, width, sizes.merge, 1)[0] for height, width in frames])
    lengths = [height * width for height, width in frames]
    return {
        "hidden_states": packed_patches(contents, device, sizes, IMAGE_MEAN, IMAGE_DEVIATION),
        "grid_thw": on_device([(1, *frame) for frame in frames], device),
        "position_ids": on_device(places, device),
        "cu_seqlens": on_device(np.cumsum([0, *lengths]), device, torch.int32),
        "max_seqlen": max(lengths),
        "lengths": lengths,
    }


def _outputs(output: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    return output.pooler_output, ()


def tower_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return the rules of the vision tower, which every rank of a first stage has whole."""
    vision = vision_of(hf)
    qkv = with_biases("attn.qkv") if vision.get("attention_bias") else ["attn.qkv.weight"]
    names = [
        "embeddings.position_embedding.weight",
        *with_biases("patch_embed.proj", "downsample", "merger.post_projection_norm"),
        *(f"{name}.weight" for name in ("post_conv_layernorm", "post_layernorm")),
        *(f"merger.{name}.weight" for name in _MERGER),
    ]
    return [
        *tensor_rules(_TOWER, _HF_TOWER, names),
        *stack_rules(
            f"{_TOWER}.blocks",
            f"{_HF_TOWER}.blocks",
            vision["depth"],
            [*qkv, *(f"{name}.weight" for name in _BLOCK)],
        ),
    ]
