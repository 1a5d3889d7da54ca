"""Matrix products of experts, one per expert into the rows of one result; and the way of tokens to them.

Autograd through the reference copies every part of a product once more, forward and backward. The sums over
the copies of a token are torch's embedding bags, which read each row once and keep none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["grouped_matmul", "token_permute", "token_unpermute"]


def grouped_matmul(x: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Return ``x[i] @ weight[e].T`` for the tokens ``i`` of each expert ``e``.

    See :class:`anygauge_hooks.kernels.GroupedMatmul`.
    """
    counts = tuple(tokens_per_expert.tolist())
    # torch leaves apply() untyped
    y: Tensor = _GroupedMatmul.apply(x, weight, counts)  # type: ignore[no-untyped-call]
    return y


class _GroupedMatmul(torch.autograd.Function):
    """One product per expert, and one more for each gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        """Return the products."""
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        return _products(x, weight.mT, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of ``x`` and ``weight``."""
        x, weight = ctx.saved_tensors
        dx = _products(grads[0], weight, ctx.counts) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None
        dweight = torch.empty_like(weight)
        for expert, rows in _rows(ctx.counts):
            torch.mm(grads[0][rows].T, x[rows], out=dweight[expert])
        return dx, dweight, None


def _products(x: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Return ``x[i] @ weight[e]`` for the tokens ``i`` of each expert ``e``."""
    y = x.new_empty(len(x), weight.shape[2])
    for expert, rows in _rows(counts):
        torch.mm(x[rows], weight[expert], out=y[rows])
    return y


def _rows(counts: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """Yield each expert and its rows."""
    start = 0
    for expert, count in enumerate(counts):
        yield expert, slice(start, start + count)
        start += count


def token_permute(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, topk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a copy of each token for each of its experts, sorted by expert.

    See :class:`anygauge_hooks.kernels.TokenPermute`.
    """
    by_expert = routing_map.t().contiguous()
    places = by_expert.flatten().cumsum(0).view(by_expert.shape).t() - 1
    rows = places.masked_select(routing_map).view(-1, topk)
    of_row = by_expert.nonzero()[:, 1]
    permuted: Tensor = _Spread.apply(tokens, rows, of_row)  # type: ignore[no-untyped-call]  # as above
    return permuted, probs.t().masked_select(by_expert), rows


def token_unpermute(permuted: Tensor, rows: Tensor) -> Tensor:
    """Return ``sum_k permuted[rows[t, k]]`` for each token ``t``, summed in float32.

    See :class:`anygauge_hooks.kernels.TokenUnpermute`.
    """
    total: Tensor = _Collect.apply(permuted, rows)  # type: ignore[no-untyped-call]  # as above
    return total


class _Spread(torch.autograd.Function):
    """Copy each token to its rows; the gradient is their sum."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: Tensor, of_row: Tensor) -> Tensor:
        """Return the copies."""
        ctx.save_for_backward(rows)
        return tokens.index_select(0, of_row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the sum of the gradients of the copies."""
        return _sums(grads[0], *ctx.saved_tensors), None, None


class _Collect(torch.autograd.Function):
    """Sum the rows of each token; the gradient is a copy for each."""

    @staticmethod
    def forward(ctx: Any, permuted: Tensor, rows: Tensor) -> Tensor:
        """Return the sums."""
        ctx.save_for_backward(rows)
        return _sums(permuted, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the copies of the gradient."""
        (rows,) = ctx.saved_tensors
        numbers = torch.arange(len(rows)).repeat_interleave(rows.shape[1])
        of_row = torch.empty_like(numbers).scatter_(0, rows.flatten().long(), numbers)
        return grads[0].index_select(0, of_row), None


def _sums(x: Tensor, rows: Tensor) -> Tensor:
    return F.embedding_bag(rows, x.contiguous(), mode="sum")
