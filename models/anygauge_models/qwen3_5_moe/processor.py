"""Images and video of Qwen3.5's mixtures of experts: as those of the dense models."""

from __future__ import annotations

from anygauge_models.qwen3_5.processor import make_processor

__all__ = ["make_processor"]
