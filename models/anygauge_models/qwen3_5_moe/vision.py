"""The vision tower of Qwen3.5's mixtures of experts: that of the dense models."""

from __future__ import annotations

from anygauge_models.qwen3_5.vision import flops, towers

__all__ = ["flops", "towers"]
