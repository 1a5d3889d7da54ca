"""Allowed difference between a kernel and the float64 reference."""

from __future__ import annotations

from collections.abc import Mapping

from anygauge_hooks.kernels import KernelImpl, Tolerance

__all__ = ["AVERAGE", "CAPS", "EXACT", "ROUNDED_ONCE", "TOLERANCES", "exceeds", "tolerance_of"]

TOLERANCES: Mapping[str, Tolerance] = {
    "float32": (1e-5, 1e-6),
    "bfloat16": (1.6e-2, 8e-3),
    "float16": (2e-3, 1e-3),
}
"""Relative and absolute tolerance by dtype. The absolute one is a fraction of the largest expected value, so
that it means the same for an output and for a gradient that sums over thousands of tokens. bfloat16 has 8
bits of precision: half a unit is 2e-3, and a gradient is rounded two or three times."""

CAPS: Mapping[str, Tolerance] = {
    "float32": (2e-3, 1e-3),
    "bfloat16": (4.8e-2, 2.4e-2),
    "float16": (8e-3, 4e-3),
}
"""Largest tolerance that a kernel may declare. That of float32 is for products of 10 bits of precision."""

EXACT: Tolerance = (3e-4, 3e-5)
"""Tolerance of a float32 output that is computed from narrower inputs as they are."""

AVERAGE: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}
"""Largest root mean square of the error, as a part of that of the values. One rounding to bfloat16 has
1.6e-3: a tensor may be rounded often, but not be wrong throughout by what one element may."""

ROUNDED_ONCE: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 3e-3, "float16": 3.8e-4}
"""The same where an op is defined as computed in float32: one rounding, or one more of a part."""


def exceeds(tolerance: Tolerance, limit: Tolerance) -> bool:
    """Return whether either number of a tolerance is above that of a limit, or is not a number."""
    return not all(value <= most for value, most in zip(tolerance, limit, strict=True))


def tolerance_of(kernel: KernelImpl, dtype: str) -> Tolerance:
    """Return what a kernel declares for a dtype, or the suite's own tolerance."""
    return (kernel.tolerance or TOLERANCES).get(dtype, TOLERANCES[dtype])
