"""Rotary angles of DeepSeek-V3: a part of each head turns, in pairs of neighbours.

Attention moves the pairs into halves first, as ``rotary_interleaved`` tells it.
"""

from __future__ import annotations

from anygauge_models.rope import half_rotary

__all__ = ["rotary"]

rotary = half_rotary(lambda hf: int(hf["qk_rope_head_dim"]))
