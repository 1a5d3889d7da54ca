"""Rotary angles of Qwen3-VL's mixtures of experts: those of the dense models."""

from __future__ import annotations

from anygauge_models.architecture import head_size
from anygauge_models.qwen3_vl.rotary import interleaved_rotary

__all__ = ["rotary"]

rotary = interleaved_rotary(head_size, (24, 20, 20), 500_000.0)
