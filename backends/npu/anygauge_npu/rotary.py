"""Rotary position embedding by torch-npu's fused operator, forward and backward.

Torch-npu's own backward keeps the input and computes gradients of the angles, within tighter limits. The
gradient of a rotation is another one, so that the forward operator does both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anygauge_npu.guards import check_dtypes, check_shape, check_size, refuse

__all__ = ["rotary_embedding"]

OP = "rotary_embedding"
WIDEST = 895
HEADS = 999


def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions.

    Cosines and sines are rounded to the dtype of ``q``: torch-npu documents no mix of dtypes. SGLang rounds
    them on NPUs too, so this adds nothing to the difference from a server (docs/figures.md).

    See :class:`anygauge_hooks.kernels.RotaryEmbedding`.

    :param cos: Within [-1, 1], as is said when the kernel is resolved: a look at the values would wait for
        the device.
    :raises KernelInputError: The operator does not take these tensors.
    """
    _check(q, k, cos, sin)
    angles = [x.to(q.dtype).contiguous().unsqueeze(1).unsqueeze(0) for x in (cos, sin)]
    return _rotate(q, *angles), _rotate(k, *angles)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_dtypes(OP, q=q, k=k)
    check_dtypes(OP, cos=cos, sin=sin)
    check_shape(OP, "q", q, (None, None, None), "[T, H, D]")
    check_shape(OP, "k", k, (len(q), None, q.shape[2]), "[T, K, D]")
    check_shape(OP, "cos", cos, (len(q), None), "[T, R]")
    check_shape(OP, "sin", sin, cos.shape, "[T, R]")
    rotary = cos.shape[1]
    if rotary % 2 or rotary > q.shape[2]:
        refuse(OP, f"{rotary} angles for heads of {q.shape[2]}", "R is even and at most D.")
    check_size(OP, "a number of angles of", rotary, 2, WIDEST)
    for name, x in (("query", q), ("key", k)):
        check_size(OP, f"a number of {name} heads of", x.shape[1], 1, HEADS)
    if cos.requires_grad or sin.requires_grad:
        refuse(OP, "angles that want a gradient", "Positions are given; detach them.")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[T, H, D]`` by angles ``[1, T, 1, R]``; what is past ``R`` stays."""
    if not x.numel():
        return x.clone()
    rotary = cos.shape[-1]
    whole = rotary == x.shape[-1]
    part = (x if whole else x[..., :rotary]).contiguous().unsqueeze(0)
    # torch leaves apply() untyped
    turned: Tensor = _Rotate.apply(part, cos, sin).squeeze(0)  # type: ignore[no-untyped-call]
    return turned if whole else torch.cat((turned, x[..., rotary:]), dim=-1)


class _Rotate(torch.autograd.Function):
    """``(a, b)`` to ``(a cos - b sin, b cos' + a sin')``, of two halves whose angles may differ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the rotated ``[1, T, H, R]``."""
        ctx.save_for_backward(cos, sin)
        turned: Tensor = torch.ops.npu.npu_rotary_mul(x, cos, sin)
        return turned

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of ``x``: the rotation back, where each half has the sine of the other."""
        cos, sin = ctx.saved_tensors
        back = torch.cat([-half for half in reversed(sin.chunk(2, dim=-1))], dim=-1)
        turned: Tensor = torch.ops.npu.npu_rotary_mul(grads[0].contiguous(), cos, back)
        return turned, None, None
