"""How far a kernel may be from the float64 reference."""

from __future__ import annotations

from collections.abc import Mapping

from anygauge_hooks.kernels import Tolerance

__all__ = ["TOLERANCES"]

TOLERANCES: Mapping[str, Tolerance] = {
    "float32": (1e-5, 1e-6),
    "bfloat16": (1.6e-2, 8e-3),
    "float16": (2e-3, 1e-3),
}
"""Relative and absolute tolerance by dtype. The absolute one is a fraction of the largest expected value, so
that it means the same for an output and for a gradient that sums over thousands of tokens. bfloat16 has 8
bits of precision: half a unit is 2e-3, and a gradient is rounded two or three times."""
