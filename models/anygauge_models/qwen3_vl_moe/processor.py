"""Images and video of Qwen3-VL's mixtures of experts: as those of the dense models."""

from __future__ import annotations

from anygauge_models.qwen3_vl.processor import make_processor

__all__ = ["make_processor"]
