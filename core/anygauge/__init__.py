"""RL post-training for LLMs, VLMs and omni models, hardware abstraction first."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
