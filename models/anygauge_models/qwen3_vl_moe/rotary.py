"""Rotary angles of Qwen3-VL's mixtures of experts: those of the dense models."""

from __future__ import annotations

from anygauge_models.architecture import head_size
from anygauge_models.qwen3_vl.rotary import rotary_in_turns

__all__ = ["rotary"]

rotary = rotary_in_turns(head_size, (24, 20, 20), 500_000.0)
