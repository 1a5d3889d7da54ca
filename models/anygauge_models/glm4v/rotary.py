"""Rotary angles of GLM-4.1V: those of GLM-4; each section of pairs turns by time, height or width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anygauge_models.glm4v.config import decoder, rotary_dim
from anygauge_models.rope import half_rotary

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["in_sections", "rotary"]

_SECTIONS = [8, 12, 12]


def rotary(hf: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each position's angles.

    :param positions: ``[T]`` or ``[3, T]``, int64.
    :returns: Two ``[T, R]`` float32 tensors.
    """
    return _rotary(in_sections(decoder(hf)), positions)


def in_sections(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decoder's config that says what transformers takes where sections are left out."""
    key = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    return {**text, key: {"mrope_section": _SECTIONS, **(text.get(key) or {})}}


_rotary = half_rotary(rotary_dim)
