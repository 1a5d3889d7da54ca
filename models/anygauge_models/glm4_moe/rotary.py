"""Rotary angles of GLM-4.5: a part of each head turns, in two halves."""

from __future__ import annotations

from anygauge_models.glm4_moe.config import rotary_dim
from anygauge_models.rope import half_rotary

__all__ = ["rotary"]

rotary = half_rotary(rotary_dim)
