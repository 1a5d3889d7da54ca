"""The meaning of every kernel op, in plain torch.

Written to be read, not to be fast. Every function also runs in float64, which is what the conformance suite
measures a backend's kernels against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

__all__ = ["rms_norm", "rotary_embedding", "swiglu", "varlen_attention", "vocab_parallel_logprob"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / rms(x) * weight``, https://arxiv.org/abs/1910.07467 equation 4.

    :param x: ``[..., D]``.
    :param weight: ``[D]``.
    :param eps: Added to the mean square.
    :returns: ``[..., D]``, the dtype of ``x``.
    """
    wide = _widen(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype)


def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, https://arxiv.org/abs/2104.09864 equation 34 in the half-rotated layout.

    :param q: ``[T, H, D]``.
    :param k: ``[T, K, D]``.
    :param cos: ``[T, R]`` with ``R <= D``.
    :param sin: ``[T, R]``.
    :returns: The rotated ``q`` and ``k``.
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary = cos.shape[-1]
    turned, kept = _widen(x[..., :rotary]), x[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
    return torch.cat((turned.to(x.dtype), kept), dim=-1)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, https://arxiv.org/abs/2002.05202 equation 5.

    :param gate_up: ``[..., 2 F]``.
    :returns: ``[..., F]``.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(_widen(gate)) * up).to(gate_up.dtype)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, *, causal: bool
) -> Tensor:
    """Attend within each packed sequence.

    :param q: ``[T, H, D]``.
    :param k: ``[T, K, D]``.
    :param v: ``[T, K, D]``.
    :param lengths: Sum to ``T``.
    :param scale: Multiplies the scores.
    :param causal: Whether a token sees only itself and what is before it.
    :returns: ``[T, H, D]``.
    """
    repeats = q.shape[1] // k.shape[1]
    keys, values = (_widen(x).repeat_interleave(repeats, dim=1) for x in (k, v))
    # one empty sequence at the end, so that there is at least one
    parts = (torch.split(x, [*lengths, 0]) for x in (_widen(q), keys, values))
    outputs = [_attend(qs, ks, vs, scale, causal) for qs, ks, vs in zip(*parts, strict=True)]
    return torch.cat(outputs).to(q.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if causal:
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def vocab_parallel_logprob(
    logits: Tensor, targets: Tensor, temperature: float, group: Any | None, *, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of the targets and the entropy, of ``softmax(logits / temperature)``.

    A logit of minus infinity is a token that cannot occur; it adds nothing to the entropy.

    :param logits: ``[T, V / tp]``; left as they are.
    :param targets: ``[T]``, int64, global vocabulary ids.
    :param temperature: Above 0.
    :param group: The process group that splits the vocabulary in rank order, or ``None``.
    :param entropy_grad: Whether the entropy carries a gradient.
    :returns: Log-probabilities ``[T]`` and entropies ``[T]`` in nats, float32 at least.
    """
    scaled = _widen(logits) / temperature
    peak = _max_over(scaled.detach().amax(-1), group)
    shifted = scaled - peak.unsqueeze(-1)
    weights = shifted.exp()
    total = _sum_over(weights.sum(-1), group)
    column, present = _local_column(targets, logits.shape[-1], group)
    chosen = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~present, 0)
    logprobs = _sum_over(chosen, group) - total.log()
    finite = shifted.masked_fill(shifted == -torch.inf, 0)
    entropy = total.log() - _sum_over((weights * finite).sum(-1), group) / total
    return logprobs, entropy if entropy_grad else entropy.detach()


def _local_column(targets: Tensor, width: int, group: Any | None) -> tuple[Tensor, Tensor]:
    """Return the column of each target in this rank's logits, and whether it is there at all."""
    column = targets - width * (0 if group is None else dist.get_rank(group))
    return column.clamp(0, width - 1), (column >= 0) & (column < width)


def _max_over(x: Tensor, group: Any | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, dist.ReduceOp.MAX, group)
    return x


def _sum_over(x: Tensor, group: Any | None) -> Tensor:
    total: Tensor = _SumOver.apply(x, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return total


class _SumOver(torch.autograd.Function):
    """Sum over a group. Every rank computes the same loss from the sum, so the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any | None) -> Tensor:
        """Return the sum of ``x`` over the ranks of ``group``."""
        total = x.clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient as it is."""
        return grads[0], None


def _widen(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or in float64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
