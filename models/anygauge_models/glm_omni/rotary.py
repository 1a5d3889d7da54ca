"""Rotary angles of GLM that sees and hears: those of its decoder's family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anygauge_models.glm_omni.config import decoder_family

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rotary"]


def rotary(hf: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each position's angles.

    :param positions: ``[T]`` or ``[3, T]``, int64.
    :returns: Two ``[T, R]`` float32 tensors.
    """
    return decoder_family(hf).rotary(hf, positions)
