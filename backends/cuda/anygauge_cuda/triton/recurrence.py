"""The gated delta rule in chunks: batched matrix products, and one kernel for what goes from chunk to chunk.

What the tokens of a chunk do to each other and to the state is computed for all chunks of all sequences
at once. A chunk then turns the state ``S`` before it into ``A S + B``, and a kernel goes from chunk to chunk,
all sequences, heads and parts of the state abreast. The gradient of that goes the other way with ``A``
transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from anygauge_cuda.guards import check_lengths, check_shape

__all__ = ["gated_delta_rule"]

LONGEST_CHUNK = 64
LEAST_TILE = 16
"""Smallest side of a matrix product in a kernel."""

PART = 32
"""Columns of a state that a program has."""

WARPS = 8


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: Sequence[int], scale: float
) -> Tensor:
    """Return ``scale * S_t q_t`` with ``S_t = exp(g_t) S_{t-1} (1 - beta_t k_t k_t^T) + beta_t v_t k_t^T``.

    https://arxiv.org/abs/2412.06464 equation 10 and section 3.3, computed in float32.

    See :class:`anygauge_hooks.kernels.GatedDeltaRule`.

    :raises KernelInputError: The shapes do not fit.
    """
    op = "gated_delta_rule"
    for name, x, last in (("q", q, k.shape[2:]), ("v", v, v.shape[2:]), ("g", g, ()), ("beta", beta, ())):
        check_shape(op, name, x, (*k.shape[:2], *last), "[T, H] and what belongs to a head")
    check_lengths(op, lengths, len(k))
    chunks = _chunks(tuple(lengths), v.device)
    tensors = (x.unsqueeze(-1) if x.dim() == 2 else x for x in (q, k, v, g, beta))
    output = _in_chunks(chunks, *(_cut(x, chunks).float() for x in tensors))
    # torch leaves apply() untyped
    rows: Tensor = _OutOf.apply(output.transpose(1, 2).flatten(0, 1), chunks)  # type: ignore[no-untyped-call]
    return (rows * scale).to(v.dtype)


class _Chunks(NamedTuple):
    """The sequences cut into chunks, those of a sequence one after the other."""

    size: int
    take: Tensor
    """For each row of the chunks, its token, or the number of tokens where it is padding."""
    back: Tensor
    """For each token, its row in the chunks."""
    starts: Tensor
    """The first chunk of each sequence, and the number of chunks, int32."""


@lru_cache(maxsize=4)  # every layer of a micro-batch, forward and backward, asks for the same
@torch.inference_mode(mode=False)  # a later pass may keep it for its gradient
def _chunks(lengths: tuple[int, ...], device: torch.device) -> _Chunks:
    size = max(1, min(LONGEST_CHUNK, max(lengths, default=1)))
    sizes = torch.tensor(lengths, dtype=torch.int64)
    counts = (sizes + size - 1) // size
    starts = F.pad(counts.cumsum(0), (1, 0))
    # a token is so many rows behind where it would be without padding
    behind = (starts[:-1] * size - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes)
    back = torch.arange(len(behind)) + behind
    take = torch.full((int(starts[-1]) * size,), len(back)).scatter_(0, back, torch.arange(len(back)))
    return _Chunks(size, take.to(device), back.to(device), starts.to(device, torch.int32))


class _Into(torch.autograd.Function):
    """Rows of tokens into chunks, with zeros for padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: _Chunks) -> Tensor:
        """Return the rows of the chunks."""
        ctx.chunks = chunks
        return _padded(x).index_select(0, chunks.take)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the rows of the tokens."""
        return grads[0].index_select(0, ctx.chunks.back), None


class _OutOf(torch.autograd.Function):
    """Rows of chunks back to tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: _Chunks) -> Tensor:
        """Return the rows of the tokens."""
        ctx.chunks = chunks
        return x.index_select(0, chunks.back)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the rows of the chunks."""
        return _padded(grads[0]).index_select(0, ctx.chunks.take), None


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, 0, 0, 1))


def _cut(x: Tensor, chunks: _Chunks) -> Tensor:
    """Return ``[N, H, C, D]`` of the chunks from ``[T, H, D]``."""
    rows: Tensor = _Into.apply(x, chunks)  # type: ignore[no-untyped-call]  # as above
    return rows.view(-1, chunks.size, *x.shape[1:]).transpose(1, 2)


def _in_chunks(chunks: _Chunks, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs of all chunks, ``[N, H, C, E]``.

    Token ``t`` adds ``k_t u_t^T`` to the state. The ``u`` of a chunk solve a triangular system, whose right
    side is linear in the state before the chunk: it is solved for both terms before the states are known.
    """
    decay, before = _decay(g)
    sides = torch.cat((beta * v, beta * before * k), dim=-1)
    system = beta * (k @ k.mT) * decay
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    fresh, taken = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    kept = (decay[:, :, -1].unsqueeze(-1) * k).mT
    left = before[:, :, -1:] * torch.eye(k.shape[-1], device=k.device)
    states: Tensor = _Scan.apply(  # type: ignore[no-untyped-call]  # as above
        left - kept @ taken, kept @ fresh, chunks.starts
    )
    mixing = (q @ k.mT) * decay
    output: Tensor = mixing @ fresh + (before * q - mixing @ taken) @ states
    return output


def _decay(g: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is left at each token of what each token added, 0 for what comes later; and of the state.

    Every sum of logarithms is taken by itself, as a product with ones: differences of their running sum
    would cancel.

    :param g: ``[N, H, C, 1]``.
    :returns: ``[N, H, C, C]`` and ``[N, H, C, 1]``.
    """
    size = g.shape[2]
    ones = torch.ones(size, size, device=g.device)
    sums = ones.tril() @ (g * ones.tril(-1))
    return sums.masked_fill(ones.triu(1).bool(), -torch.inf).exp(), (ones.tril() @ g).exp()


class _Scan(torch.autograd.Function):
    """From chunk to chunk: the state before each, and the gradients the other way."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, term: Tensor, starts: Tensor) -> Tensor:
        """Return the state before each chunk, 0 for the first of a sequence and ``A S + B`` after it.

        :param factor: ``A``, ``[N, H, D, D]``.
        :param term: ``B``, ``[N, H, D, E]``.
        :param starts: The first chunk of each sequence, and the number of chunks.
        """
        states = _scan(factor, term, starts, back=False)
        ctx.save_for_backward(factor, states, starts)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of ``A`` and ``B``, from that of the state after each chunk."""
        factor, states, starts = ctx.saved_tensors
        after = _scan(factor, grads[0], starts, back=True)
        return after @ states.mT, after, None


def _scan(factor: Tensor, term: Tensor, starts: Tensor, *, back: bool) -> Tensor:
    factor, term = factor.contiguous(), term.contiguous()
    result = torch.empty_like(term)
    heads, depth, width = term.shape[1:]
    part = min(PART, max(LEAST_TILE, triton.next_power_of_2(width)))
    _go_on[(len(starts) - 1, heads, triton.cdiv(width, part))](
        factor, term, result, starts, heads, depth, width,
        max(LEAST_TILE, triton.next_power_of_2(depth)), part, back, num_warps=WARPS,
    )  # fmt: skip
    return result


@triton.jit
def _go_on(
    factor: tl.tensor,
    term: tl.tensor,
    result: tl.tensor,
    starts: tl.tensor,
    HEADS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    BACK: tl.constexpr,
):
    """Go through the chunks of a sequence for one head and a part of the columns of its state."""
    first, end = tl.load(starts + tl.program_id(0)), tl.load(starts + tl.program_id(0) + 1)
    row, inner = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    column = tl.program_id(2) * PART + tl.arange(0, PART)[None, :]
    here, is_factor = (row < DEPTH) & (column < WIDTH), (row < DEPTH) & (inner < DEPTH)
    place = inner * DEPTH + row if BACK else row * DEPTH + inner
    state = tl.zeros((ROWS, PART), tl.float32)
    for step in range(0, end - first):
        chunk = (end - 1 - step if BACK else first + step) * HEADS + tl.program_id(1)
        start = tl.cast(chunk, tl.int64) * DEPTH
        target = start * WIDTH + row * WIDTH + column
        tl.store(result + target, state, mask=here)
        added = tl.load(term + target, mask=here, other=0.0)
        matrix = tl.load(factor + start * DEPTH + place, mask=is_factor, other=0.0)
        state = tl.dot(matrix, state, input_precision="tf32x3") + added
