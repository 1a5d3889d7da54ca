"""Rotary positions of sequences with images and video: time, height and width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from anygauge_hooks.media import Media

__all__ = ["Block", "frame_by_frame", "in_three_axes"]


class Block(NamedTuple):
    """Placeholders in a row whose positions are those of a grid."""

    start: int
    grid: tuple[int, int, int]
    """Features in time, height and width."""
    step: float = 1.0
    """Increment of the temporal position from one feature to the next."""


def in_three_axes(length: int, blocks: Iterable[Block]) -> NDArray[np.int64]:
    """Return the positions of a sequence (https://arxiv.org/abs/2409.12191 section 2.1).

    Text counts on by one on all axes. A block counts each axis from where the text has come to, and what
    follows goes on after the largest of its positions.

    :param blocks: In any order; they do not overlap.
    :returns: ``[3, length]``.
    """
    positions = np.empty((3, length), np.int64)
    filled = position = 0
    for block in sorted(blocks):
        positions[:, filled : block.start] = np.arange(position, position + block.start - filled)
        position += block.start - filled
        axes = np.indices(block.grid).reshape(3, -1)
        axes[0] = (axes[0] * block.step).astype(np.int64)
        filled = block.start + axes.shape[1]
        positions[:, block.start : filled] = axes + position
        position += int(axes.max()) + 1
    positions[:, filled:] = np.arange(position, position + length - filled)
    return positions


def frame_by_frame(hf: Mapping[str, Any], length: int, media: Sequence[Media]) -> NDArray[np.int64]:
    """Return the positions of a model whose videos are images with text between them.

    :param hf: Its ``vision_config`` says how many patches become one feature.
    :param length: Length of the sequence.
    :returns: ``[3, length]``.
    """
    merge = int(hf["vision_config"].get("spatial_merge_size", 2))
    blocks = (
        Block(start, (1, medium.grid[1] // merge, medium.grid[2] // merge))
        for medium in media
        for start, _ in medium.spans
    )
    return in_three_axes(length, blocks)
