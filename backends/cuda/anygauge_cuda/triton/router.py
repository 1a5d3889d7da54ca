"""The choice of experts and their weights, one program for a token."""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from anygauge_cuda.guards import check_shape, refuse
from anygauge_cuda.triton.rows import warps_for

__all__ = ["topk_router"]

SOFTMAX, PRE_SOFTMAX, SIGMOID = 0, 1, 2

EACH = 32
"""Places of copies by experts that a thread has."""


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

    :raises KernelInputError: The numbers do not fit.
    """
    op, experts = "topk_router", logits.shape[1]
    if not 1 <= topk <= experts:
        refuse(op, f"a topk of {topk}", f"There are {experts} experts.")
    if expert_bias is not None:
        check_shape(op, "expert_bias", expert_bias, (experts,), "[E]")
    groups = (num_groups, group_topk) if num_groups and group_topk else (1, 1)
    if experts % groups[0] or topk % groups[1] or groups[1] > groups[0]:
        refuse(op, f"{groups[1]} of {groups[0]} groups", f"They divide {experts} experts and {topk} choices.")
    kind = SIGMOID if score_function == "sigmoid" else PRE_SOFTMAX if pre_softmax else SOFTMAX
    scale = 1.0 if scaling_factor is None else scaling_factor
    # torch leaves apply() untyped
    routed: tuple[Tensor, Tensor] = _Route.apply(  # type: ignore[no-untyped-call]
        logits.contiguous(), expert_bias, topk, kind, groups, scale
    )
    return routed


class _Route(torch.autograd.Function):
    """Backward computes the weights again from the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        bias: Tensor | None,
        topk: int,
        kind: int,
        groups: tuple[int, int],
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Return weights and expert numbers."""
        count, experts = logits.shape
        weights = logits.new_empty(count, topk)
        chosen = torch.empty(count, topk, dtype=torch.int64, device=logits.device)
        size = experts // groups[0]
        _route[(count,)](
            logits, logits if bias is None else bias, weights, chosen, scale, experts, topk,
            triton.next_power_of_2(topk), *groups, triton.next_power_of_2(groups[0]), size,
            triton.next_power_of_2(size), kind, bias is not None, num_warps=1,
        )  # fmt: skip
        ctx.save_for_backward(logits, chosen)
        ctx.kind, ctx.scale = kind, scale
        ctx.mark_non_differentiable(chosen)
        return weights, chosen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits."""
        logits, chosen = ctx.saved_tensors
        (count, experts), topk = logits.shape, chosen.shape[1]
        slope = torch.empty_like(logits)
        copies, width = triton.next_power_of_2(topk), triton.next_power_of_2(experts)
        _derive[(count,)](
            logits, chosen, grads[0].contiguous(), slope, ctx.scale, experts, topk,
            copies, width, ctx.kind, num_warps=warps_for(copies * width, EACH),
        )  # fmt: skip
        return slope, None, None, None, None, None


@triton.jit
def _route(
    logits: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    chosen: tl.tensor,
    scale: float,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    COPIES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_TOPK: tl.constexpr,
    HEIGHT: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Choose for one token. Its scores are a row for each group; what is out of the choice is -inf.

    What is no number is as low as can be chosen: no expert is chosen twice, whatever the logits are.
    """
    row = tl.program_id(0).to(tl.int64) * EXPERTS
    group = tl.arange(0, HEIGHT)[:, None]
    member = tl.arange(0, WIDTH)[None, :]
    expert = group * SIZE + member
    here = (group < GROUPS) & (member < SIZE)
    logit = tl.load(logits + row + expert, mask=here, other=float("-inf")).to(tl.float32)
    peak = tl.max(tl.max(logit, 1), 0)
    total = tl.sum(tl.sum(tl.exp(logit - peak), 1), 0)
    score = logit
    if KIND == 1:
        score = tl.exp(logit - peak) / total
    if KIND == 2:
        score = tl.sigmoid(logit)
        if HAS_BIAS:
            score += tl.load(bias + expert, mask=here, other=0.0)
    score = tl.where(here, tl.maximum(score, -1e30), float("-inf"))
    if GROUPS > 1:
        score = _in_the_best_groups(score, group, expert, TOPK // GROUP_TOPK, GROUPS, GROUP_TOPK, EXPERTS)
    copy = tl.arange(0, COPIES)
    pick = tl.zeros((COPIES,), tl.int32)
    for turn in range(TOPK):
        best = tl.max(tl.max(score, 1), 0)
        first = tl.min(tl.min(tl.where(score == best, expert, EXPERTS - 1), 1), 0)
        pick = tl.where(copy == turn, first, pick)
        score = tl.where(expert == first, float("-inf"), score)
    taken = tl.load(logits + row + pick, mask=copy < TOPK, other=float("-inf")).to(tl.float32)
    place = tl.program_id(0).to(tl.int64) * TOPK + copy
    weight = _weigh(taken, peak, total, TOPK, KIND)
    tl.store(weights + place, weight * scale, mask=copy < TOPK)
    tl.store(chosen + place, pick.to(tl.int64), mask=copy < TOPK)


@triton.jit
def _in_the_best_groups(
    score: tl.tensor,
    group: tl.tensor,
    expert: tl.tensor,
    COUNTED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_TOPK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Return the scores, -inf outside the groups whose highest add up to most."""
    left = score
    total = tl.zeros_like(group).to(tl.float32)
    for _ in range(COUNTED):
        best = tl.max(left, 1, keep_dims=True)
        first = tl.min(tl.where(left == best, expert, EXPERTS), 1, keep_dims=True)
        left = tl.where(expert == first, float("-inf"), left)
        total += best
    total = tl.where(group < GROUPS, total, float("-inf"))
    is_best = group < 0
    for _ in range(GROUP_TOPK):
        best = tl.max(total, 0, keep_dims=True)
        first = tl.min(tl.where(total == best, group, GROUPS), 0, keep_dims=True)
        is_best = is_best | (group == first)
        total = tl.where(group == first, float("-inf"), total)
    return tl.where(is_best, score, float("-inf"))


@triton.jit
def _weigh(taken: tl.tensor, peak: tl.tensor, total: tl.tensor, TOPK: tl.constexpr, KIND: tl.constexpr):
    """Return the weights of the chosen, whose logits these are; past them they are -inf."""
    if KIND == 0:
        share = tl.exp(taken - tl.max(taken, 0))
        return share / tl.sum(share, 0)
    if KIND == 1:
        return tl.exp(taken - peak) / total
    share = tl.sigmoid(taken)
    if TOPK > 1:
        share = share / (tl.sum(share, 0) + 1e-20)
    return share


@triton.jit
def _derive(
    logits: tl.tensor,
    chosen: tl.tensor,
    grad: tl.tensor,
    slope: tl.tensor,
    scale: float,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    COPIES: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
):
    """Return the gradient of one token's logits."""
    row = tl.program_id(0).to(tl.int64) * EXPERTS
    expert, copy = tl.arange(0, WIDTH), tl.arange(0, COPIES)
    place = tl.program_id(0).to(tl.int64) * TOPK + copy
    here, is_copy = expert < EXPERTS, copy < TOPK
    pick = tl.load(chosen + place, mask=is_copy, other=EXPERTS).to(tl.int32)
    given = tl.load(grad + place, mask=is_copy, other=0.0).to(tl.float32) * scale
    taken = tl.load(logits + row + pick, mask=is_copy, other=float("-inf")).to(tl.float32)
    logit = tl.load(logits + row + expert, mask=here, other=float("-inf")).to(tl.float32)
    share = tl.exp(logit - tl.max(logit, 0))
    total = tl.sum(share, 0)
    weight = _weigh(taken, tl.max(logit, 0), total, TOPK, KIND)
    along = tl.sum(given * weight, 0)
    if KIND == 0:
        part = weight * (given - along)
    if KIND == 1:
        part = weight * given
    if KIND == 2:
        score = tl.sigmoid(taken)
        part = given * score * (1 - score)
        if TOPK > 1:
            part = (given - along) * weight * (1 - score)
    spread = tl.where(pick[:, None] == expert[None, :], part[:, None], 0.0)
    value = tl.sum(spread, 0)
    if KIND == 1:
        value -= share / total * along
    tl.store(slope + row + expert, value, mask=here)
