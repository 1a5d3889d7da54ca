"""Layer norm: torch's own, which is one kernel here."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["layer_norm"]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the layer norm of ``x``; torch's kernel keeps mean and variance in float32.

    :param x: ``[..., D]``.
    :param weight: ``[D]``.
    :param bias: ``[D]``.
    :param eps: Added to the variance.
    :returns: ``[..., D]``, the dtype of ``x``.
    """
    return F.layer_norm(x, weight.shape, weight, bias, eps)
