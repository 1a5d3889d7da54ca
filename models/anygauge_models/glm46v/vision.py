"""The vision tower of GLM-4.6V: that of GLM-4.1V."""

from __future__ import annotations

from anygauge_models.glm4v.vision import flops, towers

__all__ = ["flops", "towers"]
