"""Rotary angles of Qwen3."""

from __future__ import annotations

from anygauge_models.qwen3.config import head_dim
from anygauge_models.rope import half_rotary

__all__ = ["rotary"]

rotary = half_rotary(head_dim)
