"""Rotary angles of GLM-4.1V: those of GLM-4; each section of pairs turns by time, height or width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anygauge_models.angles import half_rotary
from anygauge_models.glm4v.config import decoder, rotary_dim

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rotary"]


def rotary(hf: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each position's angles.

    :param positions: ``[T]`` or ``[3, T]``, int64.
    :returns: Two ``[T, R]`` float32 tensors.
    """
    return _rotary(decoder(hf), positions)


_rotary = half_rotary(rotary_dim)
