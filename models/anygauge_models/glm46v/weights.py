"""The weight mapping of GLM-4.6V: that of GLM-4.1V."""

from __future__ import annotations

from anygauge_models.glm4v.weights import weight_rules

__all__ = ["weight_rules"]
