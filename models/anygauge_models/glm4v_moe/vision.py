"""The vision tower of GLM-4.5V: that of GLM-4.1V, under another name in transformers."""

from __future__ import annotations

from functools import partial

from anygauge_models.glm4v import vision
from anygauge_models.glm4v.vision import flops

__all__ = ["flops", "towers"]

towers = partial(vision.towers, model_type="glm4v_moe_vision")
