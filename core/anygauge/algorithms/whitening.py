"""Statistics of tokens that are spread over ranks.

Each takes a function that sums a tensor over them. Every token must count on one rank only: the ranks of a
context-parallel group, which know the same responses, are one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["explained_variance", "masked_mean", "whiten"]

Total = Callable[["Tensor"], "Tensor"]


def whiten(values_T: Tensor, mask_T: Tensor, total: Total, *, eps: float = 1e-8) -> Tensor:
    """Return ``(x - mean) / sqrt(var + eps)`` over the tokens that count on all ranks.

    The variance is the sample's (divided by ``n - 1``), from deviations to the common mean.

    :param values_T: ``[T]``, of this rank.
    :param mask_T: ``[T]``, 1 where a token counts; the others may hold anything.
    :param total: Sums a tensor over the ranks; called twice.
    :returns: ``[T]``, the dtype of ``values_T``; 0 where a token does not count.
    """
    counts = mask_T != 0
    x = values_T[counts].double()
    count, mean = _mean(x, total)
    variance = total((x - mean).square().sum()) / (count - 1).clamp(min=1)
    result = values_T.new_zeros(values_T.shape)
    result[counts] = ((x - mean) * (variance + eps).rsqrt()).to(values_T.dtype)
    return result


def masked_mean(values_T: Tensor, mask_T: Tensor, total: Total) -> float:
    """Return the mean over the tokens that count on all ranks; 0 if none does."""
    return float(_mean(values_T[mask_T != 0].double(), total)[1])


def explained_variance(values_T: Tensor, returns_T: Tensor, mask_T: Tensor, total: Total) -> float:
    """Return ``1 - Var(returns - values) / Var(returns)`` over the tokens that count on all ranks.

    :param values_T: ``[T]``, what a critic expected.
    :param returns_T: ``[T]``, what came.
    :param total: Sums a tensor over the ranks; called twice.
    :returns: 1 for a critic that knew, 0 for one that knew no more than the mean, and 0 for returns that are
        all equal.
    """
    import torch

    counts = mask_T != 0
    returns = returns_T[counts].double()
    both = torch.stack((returns, returns - values_T[counts].double()))
    count, means = _mean(both, total)
    of_returns, of_errors = (total((both - means[:, None]).square().sum(1)) / count.clamp(min=1)).tolist()
    return 1 - of_errors / of_returns if of_returns > 0 else 0.0


def _mean(x: Tensor, total: Total) -> tuple[Tensor, Tensor]:
    """Return the number of tokens on all ranks, and the mean along the last dimension."""
    import torch

    sums = x.sum(-1).reshape(-1)
    totals = total(torch.cat((sums.new_tensor([x.shape[-1]]), sums)))
    mean = totals[1:] / totals[0].clamp(min=1)
    return totals[0], mean if x.dim() > 1 else mean[0]
