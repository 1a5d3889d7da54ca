"""The config of a run: its schema, how it is loaded, and how plugins change it."""

from __future__ import annotations

from anygauge.config.schema import Config

__all__ = ["Config"]
