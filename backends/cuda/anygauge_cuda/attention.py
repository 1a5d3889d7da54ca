"""Attention over packed sequences, by cuDNN or by torch's own flash attention.

Both take cumulative lengths on the device. They are made once for a micro-batch and serve all of its layers.

Neither has to know of sinks. A sink scales the output and adds to the log-sum-exp; the gradients of queries,
keys and values are what the same backward kernel makes of these two.
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
from anygauge_cuda.packing import Mask, Packing

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
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend within each packed sequence, by cuDNN's graph of the whole.

    See :class:`anygauge_hooks.kernels.VarlenAttention`.
    """
    if not len(q):
        return _nothing(q, k, v, sinks, return_lse)
    packing = Packing.of(lengths, key_lengths)
    mask = Mask.of(packing, causal, window)
    output, sums = _Cudnn.apply(q, k, v, sinks, packing, scale, mask)  # type: ignore[no-untyped-call]  # torch leaves it so
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
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend within each packed sequence, by the flash attention that torch brings; as :func:`by_cudnn`.

    It has one head size for queries, keys and values: what is smaller is filled up with zeros.
    """
    if not len(q):
        return _nothing(q, k, v, sinks, return_lse)
    size = v.shape[-1]
    width = -(-max(q.shape[-1], size) // STEP) * STEP
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    packing = Packing.of(lengths, key_lengths)
    mask = Mask.of(packing, causal, window)
    output, sums = _Flash.apply(q, k, v, sinks, packing, scale, mask)  # type: ignore[no-untyped-call]  # torch leaves it so
    output = output if size == width else output[..., :size]
    return (output, sums) if return_lse else output


def _nothing(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the attention of no query, with gradients of 0 for the keys."""
    given = (q, k, v) if sinks is None else (q, k, v, sinks)
    output = q.new_zeros(*q.shape[:2], v.shape[2]) + 0 * sum(x.sum() for x in given)
    return (output, q.new_zeros(q.shape[:2], dtype=torch.float32)) if return_lse else output


def _dense(x: Tensor) -> Tensor:
    """Return it with neighboring elements of a head side by side; heads and tokens may lie anywhere.

    Kernels load several elements at once, so each head begins at a multiple of that.
    """
    is_even = x.data_ptr() % ALIGNMENT == 0 and all(step % STEP == 0 for step in x.stride()[:2])
    return x if x.stride(-1) == 1 and is_even else x.clone(memory_format=torch.contiguous_format)


def _with_sinks(output: Tensor, sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp with the sinks in them.

    :param output: ``[T, H, E]``.
    :param sums: ``[T, H]``, float32; as the result.
    :param sinks: ``[H]``.
    """
    total = torch.logaddexp(sums, sinks.float())
    return (output * (sums - total).exp().unsqueeze(-1)).to(output.dtype), total


def _sink_gradient(grad: Tensor, output: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks: a sink's weight times what it takes away.

    :param output: With the sinks in it; as ``sums``.
    """
    weights = (sinks.float() - sums).exp()
    return -(weights * (grad.float() * output).sum(-1)).sum(0).to(sinks.dtype)


class _Cudnn(torch.autograd.Function):
    """Output and log-sum-exp; the latter carries no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        packing: Packing,
        scale: float,
        mask: Mask,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (_dense(x) for x in (q, k, v))
        output, sums = cudnn_attention.forward(q, k, v, packing, scale, mask)
        if sinks is not None:
            output, total = _with_sinks(output, cudnn_attention.by_token(sums), sinks)
            sums = cudnn_attention.as_stored(total, sums)
        ctx.save_for_backward(q, k, v, output, sums, sinks)
        ctx.options = packing, scale, mask
        ctx.mark_non_differentiable(sums)
        return output, sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, sums, sinks = ctx.saved_tensors
        grads = cudnn_attention.backward(_dense(grad.contiguous()), q, k, v, output, sums, *ctx.options)
        by_token = cudnn_attention.by_token(sums)
        of_sinks = None if sinks is None else _sink_gradient(grad, output, by_token, sinks)
        return *grads, of_sinks, None, None, None


class _Flash(torch.autograd.Function):
    """Output and log-sum-exp; the latter carries no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        packing: Packing,
        scale: float,
        mask: Mask,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (_dense(x) for x in (q, k, v))
        bounds = [cumulative(lengths, q.device) for lengths in (packing.queries, packing.keys)]
        longest = max(packing.queries), max(packing.keys)
        output, sums, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *bounds, *longest, 0.0, mask.causal, False, scale=scale, **_flash_window(mask)
        )
        by_token = sums.t()
        if sinks is not None:
            output, by_token = _with_sinks(output, by_token, sinks)
            sums = by_token.t().contiguous()
        ctx.save_for_backward(sinks, q, k, v, output, sums, *bounds, state, unused)
        ctx.options = longest, scale, mask
        ctx.mark_non_differentiable(by_token)
        return output, by_token

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        sinks, *saved, state, unused = ctx.saved_tensors
        longest, scale, mask = ctx.options
        grads = torch.ops.aten._flash_attention_backward(
            grad, *saved, *longest, 0.0, mask.causal, state, unused, scale=scale, **_flash_window(mask)
        )
        output, sums = saved[3:5]
        of_sinks = None if sinks is None else _sink_gradient(grad, output, sums.t(), sinks)
        return *grads, of_sinks, None, None, None


def _flash_window(mask: Mask) -> dict[str, int]:
    """Return the window in the words of flash attention, which does not count the token itself."""
    return {} if mask.window is None else {"window_size_left": mask.window - 1, "window_size_right": 0}


@lru_cache(maxsize=64)
@torch.inference_mode(mode=False)  # a later pass may keep it for its gradient
def cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where sequences begin and end, ``[N + 1]``, int32; without waiting for the device."""
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, pin_memory=device.type == "cuda")
    return bounds.to(device, non_blocking=True)
