"""Vision towers of ``transformers`` fed with packed pixels: patches are cut and normalized on the device.

Everything that depends on sizes alone is made on the host, so that a forward pass waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from anygauge_hooks.media import Content
from anygauge_hooks.megatron import WeightRule

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike, NDArray
    from torch import Tensor

    from anygauge_hooks.media import Media

__all__ = [
    "PatchSizes",
    "blank_image",
    "grid_of",
    "module_fields",
    "on_device",
    "packed_patches",
    "patch_of",
    "patch_places",
    "stack_rules",
    "tensor_rules",
    "tower_flops",
    "with_biases",
]


def on_device(array: ArrayLike, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of an array on a device, for which neither waits.

    Memory that is not pinned is copied when all that the device has to do before is done, and the host stands
    still until then.

    :param array: May be one that must not be written to.
    """
    import torch

    copy = torch.tensor(array, dtype=dtype)
    return copy if device.type == copy.device.type else copy.pin_memory().to(device, non_blocking=True)


def module_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a tower's config in transformers, without those of the config as a file."""
    return {key: value for key, value in config.items() if key not in ("model_type", "dtype")}


class PatchSizes(NamedTuple):
    """Sizes of the patches of a tower."""

    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of a feature's side."""
    temporal: int
    """Frames of a patch; an image is all of them."""


def patch_of(vision: Mapping[str, Any]) -> PatchSizes:
    """Return the sizes of patches from the config of a tower."""
    return PatchSizes(vision["patch_size"], vision["spatial_merge_size"], vision["temporal_patch_size"])


def grid_of(content: Content, sizes: PatchSizes) -> tuple[int, int, int]:
    """Return how many patches a content has in time, height and width."""
    *frames, height, width, _ = content.data.shape
    return (frames[0] // sizes.temporal if frames else 1), height // sizes.patch, width // sizes.patch


def blank_image(patch: int, merge: int) -> Content:
    """Return the smallest image: one feature, black."""
    side = patch * merge
    return Content("image", np.zeros((side, side, 3), np.uint8))


def packed_patches(
    contents: Sequence[Content],
    device: torch.device,
    sizes: PatchSizes,
    mean: Sequence[float],
    deviation: Sequence[float],
) -> Tensor:
    """Return the patches of all contents, one after another, in the order of the features they are merged to.

    :param mean: Mean of each channel, of values from 0 to 1; with ``deviation`` it normalizes them.
    :returns: ``[patches, 3 * temporal * patch * patch]``, float32, on the device.
    """
    import torch

    shift, scale = (on_device(each, device) for each in (mean, deviation))
    (patch, merge, temporal), patches = sizes, []
    for content in contents:
        time, height, width = grid_of(content, sizes)
        pixels = on_device(content.data, device).float()
        frames = ((pixels * (1 / 255) - shift) / scale).reshape(-1, *content.data.shape[-3:])
        if content.kind == "image":
            frames = frames.expand(temporal, -1, -1, -1)
        cut = frames.reshape(time, temporal, height // merge, merge, patch, width // merge, merge, patch, 3)
        patches.append(cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(time * height * width, -1))
    return patches[0] if len(patches) == 1 else torch.cat(patches)


@lru_cache(maxsize=256)
def patch_places(
    height: int, width: int, merge: int, side: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Return where the patches of a frame are, in their order, and in a table of embeddings around them.

    :param height: Height of the frame, in patches.
    :param side: Side of the square table, which the frame is laid over corner to corner.
    :returns: Rows and columns ``[patches, 2]``; the four entries of the table that are mixed, and the share
        of each, ``[patches, 4]``.
    """
    rows, columns = (
        each.reshape(height // merge, merge, width // merge, merge).transpose(0, 2, 1, 3).reshape(-1)
        for each in np.indices((height, width))
    )
    (above, upper), (left, lower) = (
        _between(places, count, side) for places, count in ((rows, height), (columns, width))
    )
    entries = above[:, :, None] * side + left[:, None, :]
    shares = upper[:, :, None] * lower[:, None, :]
    return np.stack([rows, columns], 1), entries.reshape(-1, 4), shares.reshape(-1, 4)


def _between(
    places: NDArray[np.int64], count: int, side: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the two entries of a table's side that each place lies between, and the share of each."""
    # In float32 and in this order, as transformers computes it: entries of a real model differ by more.
    at = places.astype(np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
    first = np.floor(at)
    part = at - first
    entries = np.clip(np.stack([first, first + 1], 1).astype(np.int64), 0, side - 1)
    return entries, np.stack([1 - part, part], 1)


def tower_flops(
    media: Media, *, hidden: int, width: int, depth: int, gates: int, inputs: int, features: float
) -> float:
    """Return the floating-point operations of a vision tower's forward pass over one medium.

    :param hidden: Size of the tower.
    :param width: Width of its MLPs.
    :param gates: Matrices of an MLP that take its input: 1, or 2 if it is gated.
    :param inputs: Numbers in a patch.
    :param features: Weights that a feature meets in all mergers, for each patch that it is made of.
    """
    time, height, columns = media.grid
    frame = height * columns
    block = 4 * hidden * hidden + (1 + gates) * hidden * width + 2 * hidden * frame
    return 2.0 * time * frame * (inputs * hidden + depth * block + features)


def tensor_rules(canonical: str, hf: str, names: Sequence[str]) -> list[WeightRule]:
    """Return the rules of tensors that every rank has whole.

    :param canonical: How their names begin.
    :param hf: How their names in checkpoints begin.
    """
    return [WeightRule(canonical=f"{canonical}.{name}", hf=(f"{hf}.{name}",)) for name in names]


def stack_rules(canonical: str, hf: str, count: int, names: Sequence[str]) -> list[WeightRule]:
    """Return the rules of a stack of layers of its own, each of which every rank has whole.

    :param canonical: How the names begin, up to the number of the layer.
    :param count: Number of the layers.
    """
    return [
        WeightRule(
            canonical=f"{canonical}.{{layer}}.{name}",
            hf=(f"{hf}.{{layer}}.{name}",),
            layers=tuple(range(count)),
        )
        for name in names
    ]


def with_biases(*names: str) -> list[str]:
    """Return the names of the weight and of the bias of each module."""
    return [f"{name}.{part}" for name in names for part in ("weight", "bias")]
