"""Images and video of GLM-4.5V on the host: those of GLM-4.1V."""

from __future__ import annotations

from anygauge_models.glm4v.processor import make_processor

__all__ = ["make_processor"]
