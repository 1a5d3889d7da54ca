"""Attention over many short packed sequences.

One call per sequence costs more than the attention itself: an RL micro-batch holds a thousand sequences of a
few tokens. Sequences of similar length are padded on the right to one length and attended as a batch. Under a
causal mask no token sees the padding after it, so padding needs no mask of its own.

A sink is one more key before all others: queries and keys get a dimension, in which the sink alone is not 0.
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
    """Attend within each packed sequence, computed in float32.

    See :class:`anygauge_hooks.kernels.VarlenAttention`.
    """
    sizes = tuple(lengths)
    key_sizes = sizes if key_lengths is None else tuple(key_lengths)
    wide = q.float(), k.float(), v.float()
    rule = _Rule(scale, causal, window, None if sinks is None else sinks.float())
    if sizes == key_sizes and sizes and min(sizes) == max(sizes) > 0:
        output = _attend_equal(*wide, sizes, rule).to(q.dtype)
    else:
        output = _attend_ragged(*wide, sizes, key_sizes, rule).to(q.dtype)
    if not return_lse:
        return output
    return output, _log_sum_exp(*wide[:2], sizes, key_sizes, rule)


@dataclass(frozen=True, slots=True)
class _Rule:
    """How every sequence of a call is attended to."""

    scale: float
    causal: bool
    window: int | None
    sinks: Tensor | None
    """``[H]``, float32."""


@torch.no_grad()
def _log_sum_exp(
    q: Tensor, k: Tensor, lengths: Sequence[int], key_lengths: Sequence[int], rule: _Rule
) -> Tensor:
    """Return the log-sum-exp ``[T, H]`` of the scores, which torch's attention keeps to itself."""
    key_heads = k.shape[1]
    shared = q.shape[1] // key_heads
    sums = []
    for queries, keys in zip(torch.split(q, [*lengths, 0]), torch.split(k, [*key_lengths, 0]), strict=True):
        grouped = queries.reshape(len(queries), key_heads, shared, q.shape[2])
        scores = torch.einsum("qkrd,skd->qkrs", grouped, keys).mul_(rule.scale).flatten(1, 2)
        if rule.causal:
            scores += _hidden(len(queries), len(keys), 1, rule.window).unsqueeze(1)
        sums.append(scores.logsumexp(-1))
    total = torch.cat(sums)
    return total if rule.sinks is None else torch.logaddexp(total, rule.sinks)


def _attend_equal(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], rule: _Rule) -> Tensor:
    """Attend where every sequence has the same length: the batch is a view."""
    shape = len(lengths), lengths[0]
    queries, keys, values = (x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    return _attend(queries, keys, values, rule).transpose(1, 2).flatten(0, 1)


def _attend_ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    rule: _Rule,
) -> Tensor:
    """Attend over batches of similar length."""
    heads, width = q.shape[1], v.shape[-1]
    buckets = _buckets(lengths, key_lengths, rule.causal)
    query_rows = _rows(lengths, heads, tuple((bucket.length, bucket.members) for bucket in buckets))
    key_batches = tuple((bucket.key_length, bucket.members) for bucket in buckets)
    key_rows = _rows(key_lengths, k.shape[1], key_batches)
    queries = _batches(q, query_rows, [(len(b.members), b.length) for b in buckets])
    keys, values = (_batches(x, key_rows, [(len(b.members), b.key_length) for b in buckets]) for x in (k, v))
    outputs = [_attend(*batch, rule).reshape(-1, width) for batch in zip(queries, keys, values, strict=True)]
    flat = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return _permute(flat, query_rows.back, query_rows.take, query_rows.holes).view(-1, heads, width)


def _attend(q: Tensor, k: Tensor, v: Tensor, rule: _Rule) -> Tensor:
    """Attend over a batch of sequences of one length: ``[N, H, L, D]`` with ``[N, K, S, D]``."""
    if rule.sinks is not None:
        return _attend_keys(*_with_sinks(q, k, v, rule.sinks / rule.scale), rule)[..., : v.shape[-1]]
    return _attend_keys(q, k, v, rule)


def _attend_keys(q: Tensor, k: Tensor, v: Tensor, rule: _Rule) -> Tensor:
    """Attend to keys; if there are sinks, the first key is one."""
    is_plain = q.shape[2] == k.shape[2] and rule.window is None
    (count, heads, length, width), (_, key_heads, key_length, _) = q.shape, k.shape
    is_long = key_length > LONGEST_MATERIALIZED
    # query heads that share a key head are rows of one product, so that no key is repeated
    shared = heads // key_heads
    mask = None
    if rule.causal and not (is_long and is_plain):
        repeats, hidden = (1, _long_hidden) if is_long else (shared, _short_hidden)
        mask = hidden(length, key_length, repeats, rule.window, has_sink=rule.sinks is not None)
    if is_long:
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=rule.causal and is_plain, scale=rule.scale, enable_gqa=shared > 1
        )
    queries = q.reshape(count * key_heads, shared * length, width)
    weights = _weights(queries, k.flatten(0, 1), rule.scale, mask)
    return torch.bmm(weights, v.flatten(0, 1)).view(count, heads, length, v.shape[-1])


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with a first key whose product with a query is its head's sink.

    Values get a dimension, too: torch's flash kernel takes one size of all three.
    """
    (count, _, length, width), key_heads = q.shape, k.shape[1]
    unit = F.pad(k.new_ones(1), (width, 0)).expand(count, key_heads, 1, -1)
    queries = torch.cat((q, sinks[:, None, None].expand(count, -1, length, 1)), -1)
    return queries, torch.cat((unit, F.pad(k, (0, 1))), 2), F.pad(v, (0, 1, 1, 0))


def _weights(queries: Tensor, keys: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Return the softmax over the keys: ``[B, R L, S]`` from ``[B, R L, D]`` and ``[B, S, D]``.

    :param mask: ``[R L, S]``, added to the scores.
    """
    narrow = keys.shape[1] < NARROWEST_ROW
    scores = torch.bmm(keys, queries.mT) if narrow else torch.bmm(queries, keys.mT)
    scores.mul_(scale)
    if mask is not None:
        scores.add_(mask.mT if narrow else mask)
    return scores.softmax(1).mT if narrow else scores.softmax(2)


@torch.inference_mode(mode=False)  # a later pass may keep it for its gradient
def _hidden(length: int, seen: int, repeats: int, window: int | None, *, has_sink: bool = False) -> Tensor:
    """Return minus infinity where a query does not see a key: ``[repeats * length, seen]``.

    :param has_sink: Whether the first of the keys is a sink, which all see.
    """
    keys = seen - has_sink
    hidden = torch.full((length, keys), -torch.inf)
    future = hidden.triu(1 + keys - length)
    mask = future if window is None else future + hidden.tril(keys - length - window)
    return F.pad(mask, (int(has_sink), 0)).repeat(repeats, 1)


_short_hidden, _long_hidden = lru_cache(maxsize=64)(_hidden), lru_cache(maxsize=8)(_hidden)
"""The same, kept for all layers of a micro-batch; long ones are large."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Sequences that are attended as one batch."""

    length: int
    """The longest of them; the others are padded."""
    key_length: int
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
def _buckets(lengths: tuple[int, ...], key_lengths: tuple[int, ...], causal: bool) -> tuple[_Bucket, ...]:
    """Group sequences by length: by similar length if causal and keys are queries, else by the same."""
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    padded = causal and lengths == key_lengths
    for index, (length, seen) in enumerate(zip(lengths, key_lengths, strict=True)):
        if seen:
            members[(_width(length), 0) if padded else (length, seen)].append(index)
    # An empty micro-batch is one empty batch, so that its gradients exist.
    buckets = [
        _Bucket(max(lengths[i] for i in group), max(key_lengths[i] for i in group), tuple(group))
        for group in members.values()
    ]
    return tuple(buckets) or (_Bucket(1, 1, ()),)


@lru_cache(maxsize=8)  # every layer of a micro-batch, forward and backward, asks for the same
@torch.inference_mode(mode=False)
def _rows(lengths: tuple[int, ...], heads: int, batches: tuple[tuple[int, tuple[int, ...]], ...]) -> _Rows:
    """Return where the rows lie in batches, each given by its longest sequence and its members."""
    starts = torch.tensor([0, *accumulate(lengths)])
    sizes = torch.tensor(lengths, dtype=torch.int64)
    taken, real = [], []
    for longest, indices in batches:
        members = torch.tensor(indices, dtype=torch.int64)
        size, step = sizes[members].unsqueeze(1), torch.arange(longest)
        token = starts[members].unsqueeze(1) + torch.minimum(step, size - 1)
        row = token.unsqueeze(1) * heads + torch.arange(heads).unsqueeze(1)
        taken.append(row.flatten())
        real.append((step < size).unsqueeze(1).expand_as(row).flatten())
    take, is_real = torch.cat(taken), torch.cat(real)
    filled = is_real.nonzero().squeeze(1)
    back = torch.empty(sum(lengths) * heads, dtype=torch.int64)
    back[take[filled]] = filled
    return _Rows(take, back, (~is_real).nonzero().squeeze(1))


def _batches(x: Tensor, rows: _Rows, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the batches ``[N, H, L, D]`` of a packed ``[T, H, D]``, given ``N`` and ``L`` of each."""
    heads, width = x.shape[1:]
    flat = _permute(x.reshape(-1, width), rows.take, rows.back, None)
    shapes = [(count, heads, length, width) for count, length in sizes]
    parts = torch.split(flat, [count * heads * length for count, length in sizes])
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
