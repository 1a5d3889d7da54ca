"""Rotary angles of Qwen3.5: a part of each head turns. In text the three axes of a position are one."""

from __future__ import annotations

from anygauge_models.qwen3_5.config import rotary_dim
from anygauge_models.qwen3_vl.rotary import interleaved_rotary

__all__ = ["rotary"]

rotary = interleaved_rotary(rotary_dim, (11, 11, 10), 10_000.0)
