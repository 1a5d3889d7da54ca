"""Rotary angles of Qwen3-VL: pairs of dimensions turn by time, height and width in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anygauge_models.qwen3_vl.config import head_dim
from anygauge_models.rope import Rotary, half_rotary

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["interleaved_rotary", "rotary"]


def interleaved_rotary(
    size: Callable[[Mapping[str, Any]], int], sections: Sequence[int], theta: float
) -> Rotary:
    """Return the angles of a decoder whose pairs always take turns.

    :param size: Returns how many dimensions of a head turn.
    :param sections: Pairs that turn by time, height and width, where a checkpoint does not say.
    :param theta: The base of the angles, where a checkpoint does not say.
    """
    halves = half_rotary(size)

    def rotary(hf: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of each position's angles.

        :param positions: ``[T]`` or ``[3, T]``, int64.
        :returns: Two ``[T, size]`` float32 tensors.
        """
        key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
        given = {"mrope_section": sections, **(hf.get(key) or {}), "mrope_interleaved": True}
        return halves({"rope_theta": theta, **hf, key: given}, positions)

    return rotary


rotary = interleaved_rotary(head_dim, (24, 20, 20), 500_000.0)
