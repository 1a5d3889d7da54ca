"""Rotary angles of GLM-4.5V: those of GLM-4.5; each section of pairs turns by time, height or width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anygauge_models.glm4_moe import rotary as glm4_moe
from anygauge_models.glm4v.rotary import in_sections
from anygauge_models.glm4v_moe.config import decoder

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rotary"]


def rotary(hf: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each position's angles.

    :param positions: ``[T]`` or ``[3, T]``, int64.
    :returns: Two ``[T, R]`` float32 tensors.
    """
    return glm4_moe.rotary(in_sections(decoder(hf)), positions)
