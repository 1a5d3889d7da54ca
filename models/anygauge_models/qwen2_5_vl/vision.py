"""The vision tower of Qwen2.5-VL: the module of ``transformers``, and its inputs.

Most of its layers attend within windows of an image. It moves the features of each window together, and back
at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from anygauge_hooks.media import TowerSpec
from anygauge_hooks.megatron import WeightRule
from anygauge_models.glm4v.vision import IMAGE_DEVIATION, IMAGE_MEAN
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
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from anygauge_hooks.media import Content, Media

__all__ = ["flops", "tower_rules", "towers", "vision_of", "windows"]

_TOWER = "visual"
"""How the names of the tower's tensors begin, canonical ones and those of checkpoints."""
_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
}
_BLOCK = ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def vision_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the tower, with the defaults of ``transformers``."""
    return {**_DEFAULTS, **hf["vision_config"]}


def towers(hf: Mapping[str, Any]) -> tuple[TowerSpec]:
    """Return the tower."""
    return (
        TowerSpec(
            name=_TOWER,
            kinds=frozenset(("image",)),
            build=_build,
            inputs=_inputs,
            outputs=lambda output: (output.pooler_output, ()),
            blank=lambda hf: blank_image(*patch_of(vision_of(hf))[:2]),
            hf_prefixes=(f"{_TOWER}.",),
        ),
    )


def _build(hf: Mapping[str, Any]) -> nn.Module:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    config = Qwen2_5_VLVisionConfig(**module_fields(vision_of(hf)))
    tower: nn.Module = Qwen2_5_VisionTransformerPretrainedModel(config)
    return tower


def _inputs(hf: Mapping[str, Any], contents: Sequence[Content], device: torch.device) -> dict[str, Any]:
    import torch

    config = vision_of(hf)
    sizes = patch_of(config)
    grids = [grid_of(content, sizes) for content in contents]
    lengths = [height * width for _, height, width in grids]
    order, inside = windows(grids, sizes.merge, config["window_size"] // sizes.merge // sizes.patch)
    places = np.concatenate([patch_places(height, width, sizes.merge, 1)[0] for _, height, width in grids])

    def boundaries(lengths: Sequence[int]) -> Tensor:
        return on_device(np.cumsum([0, *lengths]), device, torch.int32)

    return {
        "hidden_states": packed_patches(contents, device, sizes, IMAGE_MEAN, IMAGE_DEVIATION),
        "grid_thw": torch.tensor(grids),
        "position_ids": on_device(places, device),
        "cu_seqlens": boundaries(lengths),
        "max_seqlen": max(lengths),
        "window_index": on_device(order, device),
        "cu_window_seqlens": boundaries(inside),
        "max_window_seqlen": max(inside),
        "lengths": {"cu_seqlens": tuple(lengths), "cu_window_seqlens": tuple(inside)},
    }


def windows(
    grids: Sequence[tuple[int, int, int]], merge: int, side: int
) -> tuple[NDArray[np.int64], list[int]]:
    """Return the order of features in which each window's are together, and its patches.

    :param grids: Patches of each image in time, height and width.
    :param merge: Patches of a feature's side.
    :param side: Features of a window's side; those at the right and at the bottom of an image may be smaller.
    """
    orders: list[NDArray[np.int64]] = []
    first = 0
    for _, height, width in grids:
        features = first + np.arange(height * width // merge**2).reshape(height // merge, width // merge)
        orders += [
            features[top : top + side, left : left + side].reshape(-1)
            for top in range(0, features.shape[0], side)
            for left in range(0, features.shape[1], side)
        ]
        first += features.size
    return np.concatenate(orders), [len(each) * merge**2 for each in orders]


def tower_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return the rules of the tower, which every rank of the first stage has whole."""
    single = ["patch_embed.proj.weight", "merger.ln_q.weight", *with_biases("merger.mlp.0", "merger.mlp.2")]
    block, blocks = ["norm1.weight", "norm2.weight", *with_biases(*_BLOCK)], f"{_TOWER}.blocks"
    return [
        *tensor_rules(_TOWER, _TOWER, single),
        *stack_rules(blocks, blocks, vision_of(hf)["depth"], block),
    ]


def flops(hf: Mapping[str, Any], media: Media) -> float:
    """Return the floating-point operations of the tower's forward pass; windows count as whole images."""
    config = vision_of(hf)
    patch, merge, temporal = patch_of(config)
    joined = merge * merge * config["hidden_size"]
    return tower_flops(
        media,
        hidden=config["hidden_size"],
        width=config["intermediate_size"],
        depth=config["depth"],
        gates=2,
        inputs=3 * temporal * patch * patch,
        features=joined * (joined + config["out_hidden_size"]) / merge**2,
    )
