"""Rotary angles of Mistral."""

from __future__ import annotations

from anygauge_models.angles import half_rotary
from anygauge_models.architecture import head_size

__all__ = ["rotary"]

rotary = half_rotary(head_size)
