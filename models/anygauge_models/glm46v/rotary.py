"""Rotary angles of GLM-4.6V: those of GLM-4.1V."""

from __future__ import annotations

from anygauge_models.glm4v.rotary import rotary

__all__ = ["rotary"]
