"""Permutation of tokens by torch-npu's fused operators: sorted by expert, and summed again.

Torch-npu's gradient of the sum keeps what was summed, for a gradient of weights that are all one here. Ours
copies the gradient back to the rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anygauge_npu.guards import check_dtypes, check_shape, check_size, dtype_name, refuse

__all__ = ["PERMUTED_DTYPES", "token_permute", "token_unpermute"]

PERMUTED_DTYPES = ("float32", "bfloat16")
"""Dtypes of tokens whose probabilities may be float32."""

MOST = (1 << 24) - 2
"""Tokens, experts and rows: the operator counts them in float32."""

PERMUTED_PER_TOKEN = 511
COLLECTED_PER_TOKEN = 512
"""Rows of a token: the first operator is documented for less than 512, the second for at most 512."""


def token_permute(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, topk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a copy of each token for each of its experts, sorted by expert.

    See :class:`anygauge_hooks.kernels.TokenPermute`.

    :raises KernelInputError: The operator does not take these tensors.
    """
    _check_permute(tokens, probs, routing_map, topk)
    count = len(tokens)
    if not count:
        return tokens.clone(), probs.flatten(), torch.empty(0, topk, dtype=torch.int32, device=tokens.device)
    permuted, weights, rows = torch.ops.npu.npu_moe_token_permute_with_routing_map(
        tokens, routing_map, probs=probs, num_out_tokens=count * topk
    )
    # torch leaves apply() untyped
    permuted, weights = _WithGradients.apply(permuted, weights)  # type: ignore[no-untyped-call]
    return permuted, weights, rows.view(count, topk)


class _WithGradients(torch.autograd.Function):
    """Two tensors as they are. One without a gradient gets zeros in backward: the operator wants both."""

    @staticmethod
    def forward(ctx: Any, permuted: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return views."""
        return permuted.view_as(permuted), weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients, which torch has filled in."""
        return grads


def _check_permute(tokens: Tensor, probs: Tensor, routing_map: Tensor, topk: int) -> None:
    op = "token_permute"
    check_dtypes(op, tokens=tokens)
    check_dtypes(op, probs=probs)
    if probs.dtype != tokens.dtype and (tokens.dtype, probs.dtype) != (torch.bfloat16, torch.float32):
        given = f"tokens in {dtype_name(tokens)} and probs in {dtype_name(probs)}"
        refuse(op, given, "Give both one dtype; float32 goes with bfloat16 too.")
    if routing_map.dtype != torch.bool:
        refuse(op, f"routing_map in {dtype_name(routing_map)}", "Give it in bool.")
    check_shape(op, "tokens", tokens, (None, None), "[T, H]")
    check_shape(op, "routing_map", routing_map, (len(tokens), None), "[T, E]")
    check_shape(op, "probs", probs, routing_map.shape, "[T, E]")
    experts = routing_map.shape[1]
    check_size(op, "a number of experts of", experts, 1, MOST)
    check_size(op, "a topk of", topk, 1, min(experts, PERMUTED_PER_TOKEN))
    check_size(op, "a number of rows of", len(tokens) * topk, 0, MOST)


def token_unpermute(permuted: Tensor, rows: Tensor) -> Tensor:
    """Return ``sum_k permuted[rows[t, k]]`` for each token ``t``.

    See :class:`anygauge_hooks.kernels.TokenUnpermute`.

    :raises KernelInputError: The operator does not take these tensors.
    """
    op = "token_unpermute"
    check_dtypes(op, permuted=permuted)
    check_shape(op, "rows", rows, (None, None), "[T, K]")
    check_shape(op, "permuted", permuted, (rows.numel(), None), "[T K, H]")
    check_size(op, "a topk of", rows.shape[1], 1, COLLECTED_PER_TOKEN)
    check_size(op, "a number of rows of", rows.numel(), 0, MOST)
    if rows.dtype not in (torch.int32, torch.int64):
        refuse(op, f"rows in {dtype_name(rows)}", "Give them in int32 or int64.")
    if not len(rows):
        return permuted.clone()
    total: Tensor = _Collect.apply(permuted, rows)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return total


class _Collect(torch.autograd.Function):
    """Sum the rows of each token; the gradient is a copy for each."""

    @staticmethod
    def forward(ctx: Any, permuted: Tensor, rows: Tensor) -> Tensor:
        """Return ``[T, H]``."""
        ctx.save_for_backward(rows)
        # without weights the operator would take each row for a token of its own
        weights = permuted.new_ones(rows.shape)
        total: Tensor = torch.ops.npu.npu_moe_token_unpermute(permuted, rows.flatten().int(), probs=weights)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return ``[T K, H]``."""
        (rows,) = ctx.saved_tensors
        tokens = torch.arange(len(rows), device=rows.device).repeat_interleave(rows.shape[1])
        owner = torch.empty_like(tokens).scatter_(0, rows.flatten().long(), tokens)
        return grads[0].index_select(0, owner), None
