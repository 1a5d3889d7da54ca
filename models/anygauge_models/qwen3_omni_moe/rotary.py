"""Rotary angles of Qwen3-Omni's thinker: those of Qwen3-VL, with another base where none is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anygauge_models.qwen3_vl.rotary import rotary as of_qwen3_vl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rotary"]

_THETA = 1_000_000.0


def rotary(hf: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each position's angles.

    :param positions: ``[T]`` or ``[3, T]``, int64.
    :returns: Two ``[T, R]`` float32 tensors.
    """
    return of_qwen3_vl({"rope_theta": _THETA, **hf}, positions)
