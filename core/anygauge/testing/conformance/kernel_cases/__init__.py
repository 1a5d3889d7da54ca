"""Calls of kernel ops that the conformance suite compares with the reference.

Arguments are drawn from values that are not their defaults, so that a kernel that ignores one is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anygauge.testing.conformance.kernel_cases import attention, elementwise, experts, logprob, recurrence
from anygauge.testing.conformance.kernel_cases.case import Case
from anygauge_hooks.kernels import KERNEL_OPS, KernelOp

__all__ = ["CASES", "FIRST", "FROM_FACTS", "Case"]

CASES = [case for family in (elementwise, attention, recurrence, experts, logprob) for case in family.CASES]

FIRST: Mapping[KernelOp, Case] = {op: next(case for case in CASES if case.op == op) for op in KERNEL_OPS}
"""The case of each op that is of middling size and has the most arguments."""

FROM_FACTS: Mapping[KernelOp, Callable[[Mapping[str, Any]], Case | None]] = {
    "causal_conv1d": recurrence.convolution_of,
    "gated_delta_rule": recurrence.delta_of,
    "qk_norm_rotary": elementwise.qkv_of,
    "rotary_embedding": elementwise.rotary_of,
    "token_permute": experts.permute_of,
    "token_unpermute": experts.unpermute_of,
    "topk_router": experts.router_of,
    "varlen_attention": attention.attention_of,
}
"""Functions that return a case with given facts, or ``None`` where no module can have them together."""
