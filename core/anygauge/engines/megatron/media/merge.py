"""Feature merge: puts features in place of their tokens' embeddings, and adds some after the first layers.

A layer that is computed again in the backward pass must not be the owner of a path to the towers: that path
would be walked once for each time. So layers add features without a history, and leave the gradients of those
with the micro-batch; the function that put features among the embeddings, whose backward pass is last, hands
all of them on at once (deepstack: https://arxiv.org/abs/2406.04334).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Deposits", "Features", "merge"]


@dataclass(frozen=True, slots=True)
class Features:
    """Tower features of a micro-batch, and their places. ``N`` features, ``n`` tokens."""

    main: Tensor
    """``[N, H]``, in the place of embeddings."""
    levels: Sequence[Tensor]
    """``[N, H]`` each, added after the first layers."""
    rows: Tensor
    """``[n]``, int64: which of this rank's tokens get one."""
    source: Tensor
    """``[n]``, int64: which feature each of them gets."""


@dataclass(slots=True)
class Deposits:
    """Features that the first layers add, and the gradients that come back from there."""

    levels: Sequence[Tensor]
    """``[N, H]`` each, without a history."""
    rows: Tensor
    source: Tensor
    is_learned: bool
    """Whether anybody wants the gradients."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Gradients by level: ``[n, H]``."""

    def add_to(self, hidden: Tensor, layer: int) -> Tensor:
        """Return the output of a layer with the features of its level, if it has one.

        :param hidden: ``[T, 1, H]``.
        :param layer: Index in the whole model.
        """
        if layer >= len(self.levels):
            return hidden
        if self.is_learned and torch.is_grad_enabled():
            added: Tensor = _Deposit.apply(hidden, self, layer)
            return added
        return _added(hidden, self, layer)


def merge(hidden: Tensor, features: Features, sum_over: Any = None) -> tuple[Tensor, Deposits]:
    """Return embeddings with features in the places of their tokens, and what the layers add.

    :param hidden: ``[T, 1, H]``, of this rank.
    :param sum_over: The group of sequence parallelism, whose ranks have other tokens of the same features:
        gradients of features are summed over it, in one collective.
    """
    levels = [level.detach() for level in features.levels]
    is_learned = features.main.requires_grad
    deposits = Deposits(levels, features.rows, features.source, is_learned)
    merged: Tensor = _Merge.apply(hidden, deposits, sum_over, features.main, *features.levels)
    return merged, deposits


def _added(hidden: Tensor, deposits: Deposits, level: int) -> Tensor:
    chosen = deposits.levels[level].index_select(0, deposits.source).unsqueeze(1)
    return hidden.index_add(0, deposits.rows, chosen.to(hidden.dtype))


class _Deposit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, deposits: Deposits, level: int) -> Tensor:
        """Return the sum."""
        ctx.deposits, ctx.level = deposits, level
        return _added(hidden, deposits, level)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Leave the gradient of the features with the micro-batch."""
        ctx.deposits.gradients[ctx.level] = grads[0].index_select(0, ctx.deposits.rows).squeeze(1)
        return grads[0], None, None


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, deposits: Deposits, sum_over: Any, *features: Tensor) -> Tensor:
        """Return the embeddings with features in their places."""
        ctx.deposits, ctx.sum_over, ctx.count = deposits, sum_over, len(features[0])
        ctx.dtype = features[0].dtype
        chosen = features[0].index_select(0, deposits.source).unsqueeze(1)
        return hidden.index_copy(0, deposits.rows, chosen.to(hidden.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the embeddings that are left, and those of all features."""
        deposits: Deposits = ctx.deposits
        of_hidden = grads[0].index_fill(0, deposits.rows, 0) if ctx.needs_input_grad[0] else None
        wanted = ctx.needs_input_grad[3:]
        if not any(wanted):
            return of_hidden, *[None] * (2 + len(wanted))
        main = grads[0].index_select(0, deposits.rows).squeeze(1)
        levels = [deposits.gradients.pop(level) for level in range(len(deposits.levels))]
        sums = torch.stack([_sums(each, deposits.source, ctx.count) for each in (main, *levels)])
        if ctx.sum_over is not None:
            dist.all_reduce(sums, group=ctx.sum_over)
        return of_hidden, None, None, *sums.to(ctx.dtype).unbind()


def _sums(rows: Tensor, source: Tensor, count: int) -> Tensor:
    """Return the sum of the rows of each feature ``[count, H]``, float32 at least, always with the same bits.

    :param rows: ``[n, H]``.
    """
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    sums: Tensor = torch.ops.aten.embedding_dense_backward(wide, source, count, -1, False)
    return sums
