"""The choice of experts by torch-npu's fused gates, with gradients of our own.

Torch-npu has no gradient of the softmax gate. That of the sigmoid gate is aclnnMoeGatingTopKBackward, which
by cann/ops-transformer the Ascend 950 lacks; that every CANN for torch-npu has it is not verified. Ours is
the same formula.

Groups of experts are left to the reference: the documentation does not say what becomes of those not chosen.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from anygauge_npu.guards import check_dtypes, check_shape, check_size, dtype_name, refuse

__all__ = ["SIGMOID_EXPERTS", "SIGMOID_TOPK", "topk_router"]

OP = "topk_router"
SOFTMAX_TOPK = range(1, 1025)
SIGMOID_EXPERTS = range(3, 2049)
SIGMOID_TOPK = range(2, 2049)
"""The gate divides by the sum of the chosen; of one alone, the weight is its score."""

SIGMOID = 1
EPSILON = 1e-20


def topk_router(
    logits: Tensor,
    topk: int,
    *,
    score_function: Literal["softmax", "sigmoid"],
    pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weights of the experts of each token, and which they are.

    See :class:`anygauge_hooks.kernels.TopkRouter`.

    :param num_groups: Refused.
    :param group_topk: Refused.
    :raises KernelInputError: The operator does not take these arguments.
    """
    check_shape(OP, "logits", logits, (None, None), "[T, E]")
    _check(logits, topk, score_function, expert_bias, num_groups or group_topk)
    if not len(logits):
        return logits[:, :topk], torch.empty(0, topk, dtype=torch.int64, device=logits.device)
    gate = _Sigmoid if score_function == "sigmoid" else _AllSoftmax if pre_softmax else _ChosenSoftmax
    # torch leaves apply() untyped
    weights, chosen = gate.apply(logits.float().contiguous(), topk, expert_bias)  # type: ignore[no-untyped-call]
    scaled = weights if scaling_factor is None else weights * scaling_factor
    return scaled.to(logits.dtype), chosen


def _check(logits: Tensor, topk: int, score: str, bias: Tensor | None, groups: int | None) -> None:
    check_dtypes(OP, logits=logits)
    if groups:
        refuse(OP, "groups of experts", "Resolve the op with the fact num_groups: the reference has groups.")
    if score not in ("softmax", "sigmoid"):
        refuse(OP, f"score_function {score!r}", "It is softmax or sigmoid.")
    sigmoid = score == "sigmoid"
    experts = logits.shape[1]
    if sigmoid:
        check_size(OP, "a number of experts of", experts, SIGMOID_EXPERTS[0], SIGMOID_EXPERTS[-1])
    allowed = SIGMOID_TOPK if sigmoid else SOFTMAX_TOPK
    check_size(OP, "a topk of", topk, allowed[0], min(experts, allowed[-1]))
    if bias is None:
        return
    if not sigmoid:
        refuse(OP, "expert_bias with softmax", "A bias belongs to sigmoid.")
    check_shape(OP, "expert_bias", bias, (experts,), "[E]")
    if bias.dtype != torch.float32:
        refuse(OP, f"expert_bias in {dtype_name(bias)}", "Give it in float32.")


class _ChosenSoftmax(torch.autograd.Function):
    """Softmax over the chosen: the gate's, over all, divided by the sum of the chosen."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, topk: int, bias: None) -> tuple[Tensor, Tensor]:
        """Return weights and numbers ``[T, K]``."""
        scores, chosen, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(logits, k=topk)
        weights, numbers = scores / scores.sum(1, keepdim=True), chosen.long()
        ctx.save_for_backward(weights, numbers)
        ctx.experts = logits.shape[1]
        ctx.mark_non_differentiable(numbers)
        return weights, numbers

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return ``w (g - sum w g)`` at the chosen."""
        weights, numbers = ctx.saved_tensors
        slope = weights * grads[0]
        slope = slope - weights * slope.sum(1, keepdim=True)
        return slope.new_zeros(len(slope), ctx.experts).scatter_(1, numbers, slope), None, None


class _AllSoftmax(torch.autograd.Function):
    """Softmax over all experts."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, topk: int, bias: None) -> tuple[Tensor, Tensor]:
        """Return weights and numbers ``[T, K]``."""
        weights, chosen, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(logits, k=topk)
        numbers = chosen.long()
        ctx.save_for_backward(logits, weights, numbers)
        ctx.mark_non_differentiable(numbers)
        return weights, numbers

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return ``-p sum w g`` everywhere, and ``w g`` more at the chosen."""
        logits, weights, numbers = ctx.saved_tensors
        slope = weights * grads[0]
        everywhere = logits.softmax(1).mul_(-slope.sum(1, keepdim=True))
        return everywhere.scatter_add_(1, numbers, slope), None, None


class _Sigmoid(torch.autograd.Function):
    """Sigmoids of the chosen over their sum; the bias has a part in the choice alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, topk: int, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return weights and numbers ``[T, K]``."""
        weights, chosen, _ = torch.ops.npu.npu_moe_gating_top_k(
            logits, topk, bias=bias, norm_type=SIGMOID, eps=EPSILON
        )
        numbers = chosen.long()
        ctx.save_for_backward(logits, weights, numbers)
        ctx.mark_non_differentiable(numbers)
        return weights, numbers

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return ``s' (g - sum w g) / sum s`` at the chosen, with ``s' / s = 1 - s``."""
        logits, weights, numbers = ctx.saved_tensors
        left = 1 - logits.gather(1, numbers).sigmoid()
        slope = weights * left * (grads[0] - (weights * grads[0]).sum(1, keepdim=True))
        return torch.zeros_like(logits).scatter_(1, numbers, slope), None, None
