"""Kernels for the NPU: torch-npu's fused operators, each with its own checks before it.

An op that is not here has no operator that trains on Ascend: the reference serves it, and ``anygauge hooks``
says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anygauge_hooks.kernels import KernelImpl, KernelOp
from anygauge_npu.attention import varlen_attention
from anygauge_npu.experts import grouped_matmul
from anygauge_npu.guards import DTYPES
from anygauge_npu.norms import rms_norm, swiglu
from anygauge_npu.rotary import rotary_embedding

__all__ = ["npu_kernels"]

LIMITS: Mapping[KernelOp, Mapping[str, Sequence[Any]]] = {"varlen_attention": {"return_lse": (False,)}}


def npu_kernels() -> list[KernelImpl]:
    """Return the kernels of this backend. Torch-npu is imported when one is called, not before."""
    functions: dict[KernelOp, tuple[Any, str]] = {
        "grouped_matmul": (grouped_matmul, "npu_grouped_matmul"),
        "rms_norm": (rms_norm, "npu_rms_norm"),
        "rotary_embedding": (rotary_embedding, "npu_rotary_mul"),
        "swiglu": (swiglu, "npu_swiglu"),
        "varlen_attention": (varlen_attention, "npu_fusion_attention"),
    }
    return [
        KernelImpl(op=op, fn=fn, source=f"torch_npu.{operator}", dtypes=DTYPES, limits=LIMITS.get(op))
        for op, (fn, operator) in functions.items()
    ]
