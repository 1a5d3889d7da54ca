"""Attention over packed sequences, by cuDNN or by torch's own flash attention.

Both take cumulative lengths on the device. They are made once for a micro-batch and serve all of its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anygauge_cuda import cudnn_attention
from anygauge_cuda.packing import Packing

__all__ = ["CUDNN_HEAD_SIZES", "FLASH_HEAD_SIZES", "by_cudnn", "by_flash", "cumulative"]

STEP = 8
"""Head sizes that there are kernels for are multiples of this."""

ALIGNMENT = 16
"""Bytes at whose multiples a tensor must start."""

CUDNN_HEAD_SIZES = range(STEP, 257, STEP)
FLASH_HEAD_SIZES = range(1, 257)

HOPPER = 9
"""First number of the compute capability from which on cuDNN has all of its head sizes, and is faster."""


def is_for_cudnn() -> bool:
    """Return whether the GPU of this process is one that cuDNN is taken for, as of a host without any."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= HOPPER


def by_cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    scale: float,
    *,
    causal: bool,
    key_lengths: Sequence[int] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend within each packed sequence, by cuDNN's graph of the whole.

    See :class:`anygauge_hooks.kernels.VarlenAttention`.
    """
    if not len(q):
        return _nothing(q, k, v, return_lse)
    packing = Packing.of(lengths, key_lengths)
    output, sums = _Cudnn.apply(q, k, v, packing, scale, causal)  # type: ignore[no-untyped-call]  # torch leaves it so
    return (output, cudnn_attention.by_token(sums)) if return_lse else output


def by_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    scale: float,
    *,
    causal: bool,
    key_lengths: Sequence[int] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend within each packed sequence, by the flash attention that torch brings; as :func:`by_cudnn`.

    It has one head size for queries, keys and values: what is smaller is filled up with zeros.
    """
    if not len(q):
        return _nothing(q, k, v, return_lse)
    size = v.shape[-1]
    width = -(-max(q.shape[-1], size) // STEP) * STEP
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    packing = Packing.of(lengths, key_lengths)
    output, sums = _Flash.apply(q, k, v, packing, scale, causal)  # type: ignore[no-untyped-call]  # torch leaves it so
    output = output if size == width else output[..., :size]
    return (output, sums) if return_lse else output


def _nothing(q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Return the attention of no query, with gradients of 0 for the keys."""
    output = q.new_zeros(*q.shape[:2], v.shape[2]) + 0 * (q.sum() + k.sum() + v.sum())
    return (output, q.new_zeros(q.shape[:2], dtype=torch.float32)) if return_lse else output


def _dense(x: Tensor) -> Tensor:
    """Return it with neighbouring elements of a head side by side; heads and tokens may lie anywhere.

    Kernels load several elements at once, so each head begins at a multiple of that.
    """
    is_even = x.data_ptr() % ALIGNMENT == 0 and all(step % STEP == 0 for step in x.stride()[:2])
    return x if x.stride(-1) == 1 and is_even else x.clone(memory_format=torch.contiguous_format)


class _Cudnn(torch.autograd.Function):
    """Output and log-sum-exp; the latter carries no gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (_dense(x) for x in (q, k, v))
        output, sums = cudnn_attention.forward(q, k, v, packing, scale, causal)
        ctx.save_for_backward(q, k, v, output, sums)
        ctx.options = packing, scale, causal
        ctx.mark_non_differentiable(sums)
        return output, sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, sums = ctx.saved_tensors
        grads = cudnn_attention.backward(_dense(grad.contiguous()), q, k, v, output, sums, *ctx.options)
        return *grads, None, None, None


class _Flash(torch.autograd.Function):
    """Output and log-sum-exp; the latter carries no gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (_dense(x) for x in (q, k, v))
        bounds = [cumulative(lengths, q.device) for lengths in (packing.queries, packing.keys)]
        longest = max(packing.queries), max(packing.keys)
        output, sums, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *bounds, *longest, 0.0, causal, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, output, sums, *bounds, state, unused)
        ctx.options = longest, scale, causal
        by_token = sums.t()
        ctx.mark_non_differentiable(by_token)
        return output, by_token

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *saved, state, unused = ctx.saved_tensors
        longest, scale, causal = ctx.options
        grads = torch.ops.aten._flash_attention_backward(
            grad, *saved, *longest, 0.0, causal, state, unused, scale=scale
        )
        return *grads, None, None, None


@lru_cache(maxsize=64)
@torch.inference_mode(mode=False)  # a later pass may keep it for its gradient
def cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where sequences begin and end, ``[N + 1]``, int32; without waiting for the device."""
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, pin_memory=device.type == "cuda")
    return bounds.to(device, non_blocking=True)
