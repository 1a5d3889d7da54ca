"""Images and video of GLM-4.6V on the host: GLM-4.1V's processor knows both ways to write times."""

from __future__ import annotations

from anygauge_models.glm4v.processor import make_processor

__all__ = ["make_processor"]
