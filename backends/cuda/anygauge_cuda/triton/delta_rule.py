"""The gated delta rule in seven kernels: each chunk by matrix products, and the state from chunk to chunk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from anygauge_cuda.guards import check_lengths, check_shape
from anygauge_cuda.triton import delta_kernels

__all__ = ["gated_delta_rule"]

LONGEST_CHUNK = 64
LEAST_TILE = 16
"""Smallest side of a matrix product in a kernel."""

PART = 32
"""Columns of a state that a program has on its way from chunk to chunk."""

BLOCK = 64
"""Columns that a program of a chunk has at a time."""

BACK_BLOCK = 32
"""The same in the last two kernels of the backward pass, which keep the most in registers."""

WARPS = 4
BACK_WARPS = 8
"""The same of the last two kernels of the backward pass, for the largest heads."""
LARGE_TILE = 64
"""Fewest rows of tiles that 8 warps multiply: with 16 rows Triton 3.6 gives wrong products on an H200."""
STAGES = 2


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: Sequence[int], scale: float
) -> Tensor:
    """Return ``scale * S_t q_t`` with ``S_t = exp(g_t) S_{t-1} (1 - beta_t k_t k_t^T) + beta_t v_t k_t^T``.

    https://arxiv.org/abs/2412.06464 equation 10 and section 3.3, computed in float32. For bfloat16 inputs,
    matrix products have the precision of TF32: terms that nearly cancel would be lost in bfloat16.

    See :class:`anygauge_hooks.kernels.GatedDeltaRule`.

    :raises KernelInputError: The shapes do not fit.
    """
    op = "gated_delta_rule"
    for name, x, last in (("q", q, k.shape[2:]), ("v", v, v.shape[2:]), ("g", g, ()), ("beta", beta, ())):
        check_shape(op, name, x, (*k.shape[:2], *last), "[T, H] and what belongs to a head")
    check_lengths(op, lengths, len(k))
    chunks = _chunks(tuple(lengths), v.device)
    # torch leaves apply() untyped
    output: Tensor = _DeltaRule.apply(q, k, v, g, beta, chunks, scale)  # type: ignore[no-untyped-call]
    return output


class _Chunks(NamedTuple):
    """The sequences that are not empty, cut into chunks."""

    size: int
    bounds: Tensor
    """The first token of each chunk and the one behind its last, ``[N, 2]`` in int32."""
    starts: Tensor
    """The first chunk of each sequence, and the number of chunks, int32."""


@lru_cache(maxsize=4)  # every layer of a micro-batch, forward and backward, asks for the same
@torch.inference_mode(mode=False)  # a later pass may keep it for its gradient
def _chunks(lengths: tuple[int, ...], device: torch.device) -> _Chunks:
    sizes = torch.tensor([length for length in lengths if length], dtype=torch.int64)
    size = min(LONGEST_CHUNK, max(LEAST_TILE, triton.next_power_of_2(max(lengths, default=0))))
    counts = (sizes + size - 1) // size
    starts = F.pad(counts.cumsum(0), (1, 0))
    ends = sizes.cumsum(0)
    # a chunk is so many chunks behind the first of its sequence
    behind = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(counts)
    first = (ends - sizes).repeat_interleave(counts) + behind * size
    bounds = torch.stack((first, torch.minimum(first + size, ends.repeat_interleave(counts))), dim=1)
    return _Chunks(size, bounds.to(device, torch.int32), starts.to(device, torch.int32))


class _Call(NamedTuple):
    """Inputs of the op, and how kernels are launched for them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    chunks: _Chunks
    scale: float

    def by_chunk(self, kernel: Any, *arguments: Any, block: int = BLOCK, warps: int = WARPS) -> None:
        """Launch a program for each chunk and head."""
        grid = len(self.chunks.bounds), self.k.shape[1]
        kernel[grid](*arguments, *self._sizes(block), num_warps=warps, num_stages=STAGES)

    def by_sequence(self, kernel: Any, *arguments: Any) -> None:
        """Launch a program for each sequence, head and part of the columns of a state."""
        heads, width = self.v.shape[1:]
        grid = len(self.chunks.starts) - 1, heads, triton.cdiv(width, min(PART, _tile(width)))
        kernel[grid](*arguments, *self._sizes(PART), num_warps=WARPS, num_stages=STAGES)

    def _sizes(self, columns: int) -> tuple[Any, ...]:
        """Return the last arguments of every kernel."""
        heads, depth, width = *self.k.shape[1:], self.v.shape[2]
        return (
            heads,
            depth,
            width,
            self.chunks.size,
            _tile(depth),
            min(columns, _tile(width)),
            self.k.dtype != torch.bfloat16,
        )

    def per_token(self, width: int) -> Tensor:
        """Return memory for numbers of each token and head."""
        return self.k.new_empty(*self.k.shape[:2], width, dtype=torch.float32)


def _tile(width: int) -> int:
    return max(LEAST_TILE, int(triton.next_power_of_2(width)))


def _strided(x: Tensor) -> tuple[Tensor, int, int]:
    """Return a tensor and the steps from token to token and from head to head."""
    return x, x.stride(0), x.stride(1)


class _DeltaRule(torch.autograd.Function):
    """Backward goes from chunk to chunk again, for the states, and then the other way for their gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: _Chunks, scale: float
    ) -> Tensor:
        """Return ``[T, H, E]``."""
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        call = _Call(q, k, v, g.contiguous(), beta.contiguous(), chunks, scale)
        inverse, before, after = _invert(call)
        ctx.save_for_backward(*call[:5], inverse, before, after)
        ctx.chunks, ctx.scale = chunks, scale
        states, added = _add_up(call, inverse, before, after)
        output = torch.empty_like(v, memory_format=torch.contiguous_format)
        call.by_chunk(
            delta_kernels.mix, *_strided(q), *_strided(k), call.g, before, chunks.bounds, states, added,
            output, scale,
        )  # fmt: skip
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the five tensors."""
        q, k, v, g, beta, inverse, before, after = ctx.saved_tensors
        call = _Call(q, k, v, g, beta, ctx.chunks, ctx.scale)
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        states, added = _add_up(call, inverse, before, after)
        slopes, wanted = _trace_back(call, grad, inverse, before, after)
        dq, dk, dv, dg, dbeta = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta)
        )
        dk_mixing, dg_mixing = call.per_token(k.shape[2]), torch.empty_like(before)
        rows = min(ctx.chunks.size, _tile(k.shape[2]))
        options = {"block": BACK_BLOCK, "warps": BACK_WARPS if rows >= LARGE_TILE else WARPS}
        call.by_chunk(
            delta_kernels.through_mixing, *_strided(q), *_strided(k), *_strided(grad), g, before, after,
            ctx.chunks.bounds, states, slopes, added, dq, dk_mixing, dg_mixing, ctx.scale, **options,
        )  # fmt: skip
        call.by_chunk(
            delta_kernels.through_system, *_strided(k), *_strided(v), g, beta, before, ctx.chunks.bounds,
            states, added, wanted, dk_mixing, dg_mixing, dk, dv, dg, dbeta, **options,
        )  # fmt: skip
        return dq, dk, dv, dg, dbeta, None, None


def _invert(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inverses ``[T, H, C]``, and the decays ``[T, H]`` before and after each token."""
    inverse = call.per_token(call.chunks.size)
    before, after = (torch.empty_like(call.g, dtype=torch.float32) for _ in range(2))
    call.by_chunk(
        delta_kernels.invert, *_strided(call.k), call.g, call.beta, call.chunks.bounds, inverse, before, after
    )
    return inverse, before, after


def _add_up(call: _Call, inverse: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk, ``[N, H, D, E]``, and ``U``, ``[T, H, E]``."""
    (heads, depth), width = call.k.shape[1:], call.v.shape[2]
    states = inverse.new_empty(len(call.chunks.bounds), heads, depth, width)
    added = call.per_token(width)
    call.by_sequence(
        delta_kernels.add_up, *_strided(call.k), *_strided(call.v), call.beta, before, after, inverse,
        call.chunks.bounds, call.chunks.starts, states, added,
    )  # fmt: skip
    return states, added


def _trace_back(
    call: _Call, grad: Tensor, inverse: Tensor, before: Tensor, after: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the states after chunks, ``[N, H, D, E]``, and of ``T^-1 U``, ``[T, H, E]``."""
    (heads, depth), width = call.k.shape[1:], call.v.shape[2]
    bounds, starts = call.chunks.bounds, call.chunks.starts
    inputs = *_strided(call.q), *_strided(call.k), *_strided(grad)
    local, wanted = call.per_token(width), call.per_token(width)
    call.by_chunk(delta_kernels.mix_back, *inputs, call.g, bounds, local, call.scale)
    slopes = inverse.new_empty(len(bounds), heads, depth, width)
    call.by_sequence(
        delta_kernels.trace_back, *inputs, call.beta, before, after, inverse, bounds, starts, local,
        slopes, wanted, call.scale,
    )  # fmt: skip
    return slopes, wanted
