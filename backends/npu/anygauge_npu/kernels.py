"""Kernels for the NPU: torch-npu's fused operators, each with its own checks before it.

An op that is not here has no operator that trains on Ascend: the reference serves it, and ``anygauge hooks``
says so. That is so of ``gated_delta_rule`` and ``causal_conv1d``. ``linear_logprob`` is the core's own, which
goes tile by tile and needs nothing but products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anygauge_hooks.kernels import KernelImpl, KernelOp
from anygauge_npu.attention import varlen_attention
from anygauge_npu.experts import grouped_matmul
from anygauge_npu.guards import DTYPES
from anygauge_npu.norms import layer_norm, rms_norm, swiglu
from anygauge_npu.rotary import rotary_embedding
from anygauge_npu.router import SIGMOID_EXPERTS, SIGMOID_TOPK, topk_router
from anygauge_npu.tokens import PERMUTED_DTYPES, token_permute, token_unpermute

__all__ = ["npu_kernels"]

UNGROUPED: Mapping[str, Sequence[Any]] = {"num_groups": (None,), "group_topk": (None,)}


def npu_kernels() -> list[KernelImpl]:
    """Return the kernels of this backend. Torch-npu is needed when one is called, not before."""
    sigmoid = {"score_function": ("sigmoid",), "experts": SIGMOID_EXPERTS, "topk": SIGMOID_TOPK}
    return [
        _kernel("grouped_matmul", grouped_matmul, "npu_grouped_matmul"),
        replace(_kernel("layer_norm", layer_norm, ""), source="torch.nn.functional.layer_norm"),
        _kernel("rms_norm", rms_norm, "npu_rms_norm"),
        replace(
            _kernel("rotary_embedding", rotary_embedding, "npu_rotary_mul"), limits={"unit_angles": (True,)}
        ),
        _kernel("swiglu", swiglu, "npu_swiglu"),
        replace(
            _kernel("token_permute", token_permute, "npu_moe_token_permute_with_routing_map"),
            dtypes=PERMUTED_DTYPES,
        ),
        _kernel("token_unpermute", token_unpermute, "npu_moe_token_unpermute"),
        replace(
            _kernel("topk_router", topk_router, "npu_moe_gating_top_k_softmax"),
            limits={"score_function": ("softmax",), **UNGROUPED},
        ),
        replace(_kernel("topk_router", topk_router, "npu_moe_gating_top_k"), limits={**sigmoid, **UNGROUPED}),
        # the operator takes numbers for a dropout from the generator, whether there is one or not
        replace(_kernel("varlen_attention", varlen_attention, "npu_fusion_attention"), advances_rng=True),
    ]


def _kernel(op: KernelOp, fn: Callable[..., Any], operator: str) -> KernelImpl:
    return KernelImpl(op=op, fn=fn, source=f"torch_npu.{operator}", dtypes=DTYPES, requires=("torch_npu",))
