"""The vision tower of Qwen3-VL's mixtures of experts: that of the dense models."""

from __future__ import annotations

from anygauge_models.qwen3_vl.vision import flops, towers

__all__ = ["flops", "towers"]
