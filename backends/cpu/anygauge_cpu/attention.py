"""Attention over many short packed sequences.

One call per sequence costs more than the attention itself: an RL micro-batch holds a thousand sequences of a
few tokens. Sequences of similar length are padded on the right to one length and attended as a batch. Under a
causal mask no token sees the padding after it, so padding needs no mask of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["varlen_attention"]

LONGEST_MATERIALIZED = 128
"""Up to this many tokens, two batched matrix products beat torch's flash kernel, forward and backward."""

NARROWEST_ROW = 32
"""Torch's softmax over a last dimension shorter than this is up to 11 times slower than over another one, so
the scores of shorter sequences are kept transposed."""


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, *, causal: bool
) -> Tensor:
    """Attend within each packed sequence, computed in float32.

    :param q: ``[T, H, D]``.
    :param k: ``[T, K, D]``.
    :param v: ``[T, K, D]``.
    :param lengths: Sum to ``T``.
    :param scale: Multiplies the scores.
    :param causal: Whether a token sees only itself and what is before it.
    :returns: ``[T, H, D]``.
    """
    sizes = tuple(lengths)
    attend = _attend_equal if sizes and min(sizes) == max(sizes) > 0 else _attend_ragged
    return attend(q.float(), k.float(), v.float(), sizes, scale, causal).to(q.dtype)


def _attend_equal(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float, causal: bool
) -> Tensor:
    """Attend where every sequence has the same length: the batch is a view."""
    shape = len(lengths), lengths[0]
    queries, keys, values = (x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    return _attend(queries, keys, values, scale, causal).transpose(1, 2).flatten(0, 1)


def _attend_ragged(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float, causal: bool
) -> Tensor:
    """Attend over batches of similar length."""
    heads, width = q.shape[1], v.shape[-1]
    buckets = _buckets(lengths, causal)
    query_rows, key_rows = _rows(lengths, heads, causal), _rows(lengths, k.shape[1], causal)
    queries = _batches(q, query_rows, buckets)
    keys, values = (_batches(x, key_rows, buckets) for x in (k, v))
    outputs = [
        _attend(*batch, scale, causal).reshape(-1, width) for batch in zip(queries, keys, values, strict=True)
    ]
    flat = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return _permute(flat, query_rows.back, query_rows.take, query_rows.holes).view(-1, heads, width)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Attend over a batch of sequences of one length: ``[N, H, L, D]`` with ``[N, K, L, D]``."""
    (count, heads, length, width), key_heads = q.shape, k.shape[1]
    if length > LONGEST_MATERIALIZED:
        grouped = heads != key_heads
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    # query heads that share a key head are rows of one product, so that no key is repeated
    shared = heads // key_heads
    queries = q.reshape(count * key_heads, shared * length, width)
    weights = _weights(queries, k.flatten(0, 1), scale, shared if causal else 0)
    return torch.bmm(weights, v.flatten(0, 1)).view(count, heads, length, v.shape[-1])


def _weights(queries: Tensor, keys: Tensor, scale: float, causal_repeats: int) -> Tensor:
    """Return the softmax over the keys: ``[B, R L, L]`` from ``[B, R L, D]`` and ``[B, L, D]``.

    :param causal_repeats: ``R`` under a causal mask, 0 without a mask.
    """
    length = keys.shape[1]
    narrow = length < NARROWEST_ROW
    scores = torch.bmm(keys, queries.mT) if narrow else torch.bmm(queries, keys.mT)
    scores.mul_(scale)
    if causal_repeats:
        future = _future(length, causal_repeats)
        scores.add_(future.mT if narrow else future)
    return scores.softmax(1).mT if narrow else scores.softmax(2)


@lru_cache(maxsize=64)
def _future(length: int, repeats: int) -> Tensor:
    """Return minus infinity where a key comes after its query: ``[repeats * length, length]``."""
    return torch.full((length, length), -torch.inf).triu_(1).repeat(repeats, 1)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Sequences that are attended as one batch."""

    length: int
    """The longest of them; the others are padded."""
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where the rows ``[D]`` of a packed ``[T, H, D]`` lie in the batches, which follow each other."""

    take: Tensor
    """For each row of the batches, its row in the packed tensor. Padding repeats a token."""
    back: Tensor
    """For each row of the packed tensor, its row in the batches."""
    holes: Tensor
    """The rows of the batches that are padding."""


def _width(length: int) -> int:
    """Return the length rounded up to one of four steps per octave, at least 4."""
    step = max(4, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step


@lru_cache(maxsize=4)
def _buckets(lengths: tuple[int, ...], causal: bool) -> tuple[_Bucket, ...]:
    """Group sequences by length: by similar length if causal, else by the same."""
    members: dict[int, list[int]] = defaultdict(list)
    for index, length in enumerate(lengths):
        if length:
            members[_width(length) if causal else length].append(index)
    # An empty micro-batch is one empty batch, so that its gradients exist.
    found = [_Bucket(max(lengths[i] for i in group), tuple(group)) for group in members.values()]
    return tuple(found) or (_Bucket(1, ()),)


@lru_cache(maxsize=4)  # every layer of a micro-batch, forward and backward, asks for the same
def _rows(lengths: tuple[int, ...], heads: int, causal: bool) -> _Rows:
    starts = torch.tensor([0, *accumulate(lengths)])
    sizes = torch.tensor(lengths, dtype=torch.int64)
    taken, real = [], []
    for bucket in _buckets(lengths, causal):
        members = torch.tensor(bucket.members, dtype=torch.int64)
        size, step = sizes[members].unsqueeze(1), torch.arange(bucket.length)
        token = starts[members].unsqueeze(1) + torch.minimum(step, size - 1)
        row = token.unsqueeze(1) * heads + torch.arange(heads).unsqueeze(1)
        taken.append(row.flatten())
        real.append((step < size).unsqueeze(1).expand_as(row).flatten())
    take, is_real = torch.cat(taken), torch.cat(real)
    filled = is_real.nonzero().squeeze(1)
    back = torch.empty(sum(lengths) * heads, dtype=torch.int64)
    back[take[filled]] = filled
    return _Rows(take, back, (~is_real).nonzero().squeeze(1))


def _batches(x: Tensor, rows: _Rows, buckets: Sequence[_Bucket]) -> list[Tensor]:
    """Return the batches ``[N, H, L, D]`` of a packed ``[T, H, D]``."""
    heads, width = x.shape[1:]
    flat = _permute(x.reshape(-1, width), rows.take, rows.back, None)
    shapes = [(len(bucket.members), heads, bucket.length, width) for bucket in buckets]
    parts = torch.split(flat, [n * h * length for n, h, length, _ in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _permute(x: Tensor, take: Tensor, back: Tensor, holes: Tensor | None) -> Tensor:
    # torch leaves apply() untyped
    y: Tensor = _Permute.apply(x, take, back, holes)  # type: ignore[no-untyped-call]
    return y


class _Permute(torch.autograd.Function):
    """Select rows, where the way back is a selection too; the gradient torch knows is a slow scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, take: Tensor, back: Tensor, holes: Tensor | None) -> Tensor:
        """Return the rows ``take`` of ``x``."""
        ctx.back, ctx.holes = back, holes
        return x.index_select(0, take)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the rows ``back`` of the gradient; padding has none."""
        grad = grads[0].index_select(0, ctx.back)
        return grad if ctx.holes is None else grad.index_fill_(0, ctx.holes, 0), None, None, None
