"""Rotary angles of Llama."""

from __future__ import annotations

from anygauge_models.architecture import head_size
from anygauge_models.rope import half_rotary

__all__ = ["rotary"]

rotary = half_rotary(head_size)
