"""Kernels for the host. ``bench/kernels.py`` measures each against its reference and torch's own.

``swiglu`` is autograd through torch's own two operators: the fastest of what was tried.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anygauge_cpu.attention import varlen_attention
from anygauge_cpu.experts import grouped_matmul, token_permute, token_unpermute
from anygauge_cpu.logprob import vocab_parallel_logprob
from anygauge_cpu.recurrence import causal_conv1d, gated_delta_rule
from anygauge_hooks.kernels import KernelImpl, KernelOp

__all__ = ["cpu_kernels", "layer_norm", "rms_norm", "rotary_embedding", "swiglu"]


def cpu_kernels() -> list[KernelImpl]:
    """Return the kernels of this backend."""
    functions: dict[KernelOp, Any] = {
        "causal_conv1d": causal_conv1d,
        "gated_delta_rule": gated_delta_rule,
        "grouped_matmul": grouped_matmul,
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "rotary_embedding": rotary_embedding,
        "swiglu": swiglu,
        "token_permute": token_permute,
        "token_unpermute": token_unpermute,
        "varlen_attention": varlen_attention,
        "vocab_parallel_logprob": vocab_parallel_logprob,
    }
    return [KernelImpl(op=op, fn=fn, source=f"{fn.__module__}.{fn.__name__}") for op, fn in functions.items()]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the layer norm of ``x``: torch's own, in float32, because it rounds the mean of a bfloat16 row.

    See :class:`anygauge_hooks.kernels.LayerNorm`.
    """
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / rms(x) * weight``, computed in float32.

    See :class:`anygauge_hooks.kernels.RmsNorm`.
    """
    y: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return y


class _RmsNorm(torch.autograd.Function):
    """RMS norm whose backward is layer norm's fused one with a mean of zero.

    With mean 0 that operator returns ``r (g w - mean(g w) - x r mean(g w x r))``, ``r = 1 / rms(x)``. The
    gradient of RMS norm lacks the middle term, a scalar per row, which is added back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the normalized ``x``."""
        wide = x.float()
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        y = torch.mul(wide, scale).mul_(weight)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return the gradients of ``x`` and ``weight``."""
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        grad, gain = grads[0].float().contiguous(), weight.float()
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x.float(), [width], torch.zeros_like(scale), scale, gain, None,
            [True, ctx.needs_input_grad[1], False],
        )  # fmt: skip
        lost = torch.mv(grad.view(-1, width), gain).view_as(scale).mul_(scale).div_(width)
        return dx.add_(lost).to(x.dtype), dweight.to(weight.dtype) if dweight is not None else None, None


def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions, computed in float32.

    See :class:`anygauge_hooks.kernels.RotaryEmbedding`.
    """
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)
    return _rotate(q, cos, signed), _rotate(k, cos, signed)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary, width = cos.shape[-1], x.shape[-1]
    part = x if rotary == width else x[..., :rotary]
    # torch leaves apply() untyped
    turned: Tensor = _Rotate.apply(part, cos.unsqueeze(1), sin.unsqueeze(1))  # type: ignore[no-untyped-call]
    return turned if rotary == width else torch.cat((turned, x[..., rotary:]), dim=-1)


class _Rotate(torch.autograd.Function):
    """``x cos + swap(x) sin`` where ``swap`` exchanges the halves and ``sin`` carries the sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the rotated ``x``."""
        ctx.save_for_backward(cos, sin)
        return _rotate_heads(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of ``x``: the rotation by the opposite angle."""
        cos, sin = ctx.saved_tensors
        return _rotate_heads(grads[0], cos, _swap(sin)), None, None


def _rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    turned = torch.mul(wide, cos).addcmul_(_swap(wide), sin)
    return turned.to(x.dtype)


def _swap(x: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, dims=-1)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``.

    See :class:`anygauge_hooks.kernels.Swiglu`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
