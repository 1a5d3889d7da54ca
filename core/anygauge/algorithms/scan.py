"""Discounted sums over the tokens of packed sequences, as a parallel scan.

Shape suffixes: N samples, T their response tokens end to end, C those that count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["discounted_sums", "last_tokens", "sample_of_token"]


def discounted_sums(values_C: Tensor, decay: float, lengths: Sequence[int]) -> Tensor:
    """Return ``y_t = x_t + decay * y_{t+1}`` within each sequence, with 0 after its end.

    Twice as many terms are added in each round (Hillis and Steele, https://doi.org/10.1145/7902.7903), so
    that a sequence of ``L`` tokens takes ``log2(L)`` operations on whole tensors.

    :param values_C: ``[C]``, sequences end to end.
    :param decay: From 0 to 1.
    :param lengths: Length of each sequence; they add up to ``C``.
    :returns: ``[C]``, the dtype of ``values_C``.
    """
    import torch

    sums, factors = values_C, torch.full_like(values_C, decay)
    factors[last_tokens(lengths)] = 0.0
    reach, longest = 1, max(lengths, default=0)
    while reach < longest:
        sums = torch.cat((sums[:-reach] + factors[:-reach] * sums[reach:], sums[-reach:]))
        factors = torch.cat((factors[:-reach] * factors[reach:], torch.zeros_like(factors[-reach:])))
        reach *= 2
    return sums


def last_tokens(lengths: Sequence[int]) -> Tensor:
    """Return the index of the last token of each non-empty sequence, int64."""
    import torch

    counts = torch.tensor(lengths, dtype=torch.int64)
    return counts.cumsum(0)[counts > 0] - 1


def sample_of_token(lengths: Sequence[int]) -> Tensor:
    """Return the sequence index of each token, ``[T]``, int64."""
    import torch

    return torch.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
