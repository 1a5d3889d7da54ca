"""Convolution and gated delta rule over many short packed sequences, without a loop over the sequences.

The delta rule goes in chunks: what tokens of a chunk do to each other is computed for all chunks of all
sequences at once, and only what a state carries from chunk to chunk goes step by step, all sequences abreast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["causal_conv1d", "gated_delta_rule"]

LONGEST_CHUNK = 64


def causal_conv1d(x: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return ``silu(sum_w weight[c, w] * x[t - W + 1 + w, c])`` within each sequence, computed in float32.

    See :class:`anygauge_hooks.kernels.CausalConv1d`.
    """
    wide, taps = x.float(), weight.float().unbind(1)
    place = _places(tuple(lengths)).unsqueeze(1)
    total = wide * taps[-1]
    for back in range(1, min(len(taps), len(x))):
        earlier = F.pad(wide[:-back], (0, 0, back, 0)).masked_fill(place < back, 0)
        total = total + earlier * taps[-1 - back]
    return F.silu(total).to(x.dtype)


@lru_cache(maxsize=4)
@torch.inference_mode(mode=False)  # a later pass may keep it for its gradient
def _places(lengths: tuple[int, ...]) -> Tensor:
    """Return the position of each token in its sequence."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    return torch.arange(len(starts)) - starts


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: Sequence[int], scale: float
) -> Tensor:
    """Return ``scale * S_t q_t`` with ``S_t = exp(g_t) S_{t-1} (1 - beta_t k_t k_t^T) + beta_t v_t k_t^T``.

    https://arxiv.org/abs/2412.06464 equation 10 and section 3.3, computed in float32.

    See :class:`anygauge_hooks.kernels.GatedDeltaRule`.
    """
    chunks = _chunks(tuple(lengths))
    tensors = (x.float().unsqueeze(-1) if x.dim() == 2 else x.float() for x in (q, k, v, g, beta))
    outputs = _scan(chunks.abreast, *(_gather(x, chunks) for x in tensors))
    flat = outputs.transpose(1, 2).flatten(0, 1)
    return (flat.index_select(0, chunks.back) * scale).to(v.dtype)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The sequences cut into chunks: the first chunk of each, then the second of those that have one, ..."""

    size: int
    take: Tensor
    """For each row of the chunks, its token, or the number of tokens where it is padding."""
    back: Tensor
    """For each token, its row in the chunks."""
    abreast: tuple[int, ...]
    """How many sequences have a first chunk, a second one, ..."""


@lru_cache(maxsize=4)  # every layer of a micro-batch, forward and backward, asks for the same
@torch.inference_mode(mode=False)
def _chunks(lengths: tuple[int, ...]) -> _Chunks:
    size = max(1, min(LONGEST_CHUNK, max(lengths, default=1)))
    # longest first, so that those that go on are always the first ones
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # An empty micro-batch is one step of nothing, so that its gradients exist.
    steps = max(1, -(-max(lengths, default=0) // size))
    abreast = tuple(sum(length > step * size for length in lengths) for step in range(steps))
    sizes = torch.tensor(lengths, dtype=torch.int64)
    starts = (sizes.cumsum(0) - sizes)[order]
    take = [torch.empty(0, size, dtype=torch.int64)]
    for step, count in enumerate(abreast):
        offsets = torch.arange(step * size, (step + 1) * size)
        inside = offsets < sizes[order][:count, None]
        take.append(torch.where(inside, starts[:count, None] + offsets, sum(lengths)))
    rows = torch.cat(take).flatten()
    back = torch.empty(sum(lengths) + 1, dtype=torch.int64)
    back[rows] = torch.arange(len(rows))
    return _Chunks(size, rows, back[:-1], abreast)


def _gather(x: Tensor, chunks: _Chunks) -> Tensor:
    """Return ``[N, H, C, D]`` of the chunks from ``[T, H, D]``, with zeros for padding."""
    padded = F.pad(x, (0, 0, 0, 0, 0, 1))
    taken = padded.index_select(0, chunks.take)
    return taken.view(-1, chunks.size, *x.shape[1:]).transpose(1, 2)


def _scan(abreast: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs of all chunks, ``[N, H, C, E]``.

    Token ``t`` adds ``k_t u_t^T`` to the state. The ``u`` of a chunk solve a triangular system, whose right
    side is linear in the state before the chunk: it is solved for both terms before the states are known.
    """
    decay, before, width = _decay(g), g.cumsum(2).exp(), v.shape[-1]
    sides = torch.cat((beta * v, beta * before * k), dim=-1)
    solved = torch.linalg.solve_triangular(beta * (k @ k.mT) * decay, sides, upper=False, unitriangular=True)
    # of each chunk: what is added without a state before it, what a state takes away from that, how tokens
    # read the state and each other, how they are kept to the end of the chunk, and what is left of the state
    terms = (
        solved[..., :width],
        solved[..., width:],
        before * q,
        (q @ k.mT) * decay,
        (decay[:, :, -1].unsqueeze(-1) * k).mT,
        before[:, :, -1:],
    )
    state = v.new_zeros(1, v.shape[1], k.shape[-1], width)
    outputs = []
    for fresh, taken, reading, mixing, kept, left in zip(
        *(torch.split(x, list(abreast)) for x in terms), strict=True
    ):
        state = state[: len(fresh)]
        added = fresh - taken @ state
        outputs.append(reading @ state + mixing @ added)
        state = left * state + kept @ added
    return torch.cat(outputs)


def _decay(g: Tensor) -> Tensor:
    """Return what is left at each token of what each token added, 0 for what comes later.

    Every sum of logarithms is taken by itself: differences of their running sum would cancel.

    :param g: ``[N, H, C, 1]``.
    :returns: ``[N, H, C, C]``.
    """
    size = g.shape[2]
    not_later, future = _masks(size)
    steps = g.expand(-1, -1, -1, size).masked_fill(not_later, 0)
    return steps.cumsum(2).masked_fill_(future, -torch.inf).exp()


@lru_cache(maxsize=8)
@torch.inference_mode(mode=False)
def _masks(size: int) -> tuple[Tensor, Tensor]:
    """Return where a column is not before its row, and where it is after it."""
    ones = torch.ones(size, size, dtype=torch.bool)
    return ones.triu(), ones.triu(1)
