"""The vision tower of Qwen3-VL and of families after it: the module of ``transformers``, and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from anygauge_hooks.media import Content, Media, TowerSpec
from anygauge_hooks.megatron import WeightRule
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

__all__ = [
    "DEVIATION",
    "HF_TOWER",
    "MEAN",
    "TOWER",
    "flops",
    "inputs",
    "levels",
    "outputs",
    "tower_rules",
    "towers",
    "vision_of",
]

TOWER, HF_TOWER = "visual", "model.visual"
"""How the names of the tower's tensors begin, canonical ones and those of checkpoints."""
MEAN = DEVIATION = (0.5, 0.5, 0.5)
"""Mean and standard deviation of red, green and blue, in every published model."""
_DEFAULTS = {
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
BLOCK = ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
_MERGER = ("norm", "linear_fc1", "linear_fc2")


def vision_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the tower, with the defaults of ``transformers``."""
    return {**_DEFAULTS, **hf["vision_config"]}


def levels(hf: Mapping[str, Any]) -> int:
    """Return after how many layers of the decoder features are added."""
    return len(vision_of(hf)["deepstack_visual_indexes"])


def towers(hf: Mapping[str, Any]) -> tuple[TowerSpec]:
    """Return the tower."""
    return (
        TowerSpec(
            name=TOWER,
            kinds=frozenset(("image", "video")),
            build=_build,
            inputs=inputs,
            outputs=outputs,
            blank=blank,
            levels=levels,
            hf_prefixes=(f"{HF_TOWER}.",),
        ),
    )


def _build(hf: Mapping[str, Any]) -> nn.Module:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    tower: nn.Module = Qwen3VLVisionModel(Qwen3VLVisionConfig(**module_fields(vision_of(hf))))
    return tower


def inputs(hf: Mapping[str, Any], contents: Sequence[Content], device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of the tower's forward pass, and the lengths of its attention."""
    import torch

    config = vision_of(hf)
    sizes = patch_of(config)
    grids = [grid_of(content, sizes) for content in contents]
    side = int(config["num_position_embeddings"] ** 0.5)
    frames = [(height, width) for time, height, width in grids for _ in range(time)]
    lengths = [height * width for height, width in frames]
    places, entries, shares = (
        on_device(np.concatenate(each), device)
        for each in zip(*(patch_places(*frame, sizes.merge, side) for frame in frames), strict=True)
    )
    return {
        "hidden_states": packed_patches(contents, device, sizes, MEAN, DEVIATION),
        "grid_thw": torch.tensor(grids),
        "cu_seqlens": on_device([0, *np.cumsum(lengths)], device, torch.int32),
        "max_seqlen": max(lengths),
        "position_ids": places,
        "interp_indices": entries,
        "interp_weights": shares,
        "lengths": tuple(lengths),
    }


def outputs(output: Any) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the features of the last layer, and those of layers before it."""
    return output.pooler_output, getattr(output, "deepstack_features", None) or ()


def blank(hf: Mapping[str, Any]) -> Content:
    """Return the smallest image."""
    config = vision_of(hf)
    return blank_image(config["patch_size"], config["spatial_merge_size"])


def tower_rules(
    hf: Mapping[str, Any], levels: Callable[[Mapping[str, Any]], int] = levels
) -> list[WeightRule]:
    """Return the rules of the tower, which every rank of the first stage has whole.

    :param levels: As in ``TowerSpec``.
    """
    single = ["pos_embed.weight", *with_biases("patch_embed.proj", *(f"merger.{x}" for x in _MERGER))]
    mergers = f"{TOWER}.deepstack_merger_list", f"{HF_TOWER}.deepstack_merger_list"
    depth = vision_of(hf)["depth"]
    return [
        *tensor_rules(TOWER, HF_TOWER, single),
        *stack_rules(f"{TOWER}.blocks", f"{HF_TOWER}.blocks", depth, with_biases(*BLOCK)),
        *stack_rules(*mergers, levels(hf), with_biases(*_MERGER)),
    ]


def flops(hf: Mapping[str, Any], media: Media, levels: Callable[[Mapping[str, Any]], int] = levels) -> float:
    """Return the floating-point operations of the tower's forward pass over one image or video."""
    config = vision_of(hf)
    hidden, merged = config["hidden_size"], config["spatial_merge_size"] ** 2
    joined = merged * hidden
    merger = joined * (joined + config["out_hidden_size"])
    return tower_flops(
        media,
        hidden=hidden,
        width=config["intermediate_size"],
        depth=config["depth"],
        gates=1,
        inputs=config["in_channels"] * config["temporal_patch_size"] * config["patch_size"] ** 2,
        features=merger * (1 + levels(hf)) / merged,
    )
