"""The family of GLM-4.6V."""

from __future__ import annotations

from dataclasses import replace

from anygauge_models.glm4v.spec import GLM4V
from anygauge_models.glm46v import config

__all__ = ["GLM46V"]

GLM46V = replace(
    GLM4V,
    name="glm46v",
    architectures=("Glm46VForConditionalGeneration",),
    tiny=config.tiny,
)
