"""Torch's own operators, which kernels are measured against on every device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return torch's RMS norm of the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Return queries and keys, turned in two halves."""
    cos, sin = cos.to(q.dtype).unsqueeze(1), sin.to(q.dtype).unsqueeze(1)
    halves = [x.chunk(2, dim=-1) for x in (q, k)]
    swapped = [torch.cat((-second, first), dim=-1) for first, second in halves]
    return tuple(x * cos + y * sin for x, y in zip((q, k), swapped, strict=True))


def swiglu(gate_up: Tensor) -> Tensor:
    """Return the product of ``silu`` of the first half and the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def permute(tokens: Tensor, probs: Tensor, routing_map: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return the copies by torch's selection, whose gradient is a sum in the dtype of the tokens."""
    by_expert = routing_map.t()
    return tokens.index_select(0, by_expert.nonzero()[:, 1]), probs.t().masked_select(by_expert)
