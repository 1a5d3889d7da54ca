"""Rotary angles of Qwen3-VL: pairs of dimensions turn by time, height and width in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from anygauge_models.angles import Rotary, half_rotary
from anygauge_models.qwen3_vl.config import head_dim

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rotary", "rotary_in_turns"]

_SECTIONS = [24, 20, 20]
_THETA = 500_000.0


def rotary_in_turns(size: Callable[[Mapping[str, Any]], int]) -> Rotary:
    """Return the angles of Qwen3-VL's decoders.

    :param size: Returns the size of a head.
    """
    halves = half_rotary(size)

    def rotary(hf: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of each position's angles.

        :param positions: ``[T]`` or ``[3, T]``, int64.
        :returns: Two ``[T, size]`` float32 tensors.
        """
        return halves(_completed(hf), positions)

    return rotary


def _completed(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config that says what transformers takes where it is left out."""
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    given = {"mrope_section": _SECTIONS, **(hf.get(key) or {}), "mrope_interleaved": True}
    return {"rope_theta": _THETA, **hf, key: given}


rotary = rotary_in_turns(head_dim)
