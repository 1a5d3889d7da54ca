"""Context parallelism: each rank has two chunks of every sequence and gathers the keys it needs.

A sequence is cut into ``2 C`` chunks for ``C`` ranks. Rank ``r`` has chunks ``r`` and ``2 C - 1 - r``, one
from the front and one from the back, so that under a causal mask all ranks do the same work
(https://arxiv.org/abs/2407.21783 section 3.3.2). Keys and values are gathered before attention, and the local
kernel sees for each chunk of queries the keys up to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.data.batch import ranges

__all__ = [
    "Cut",
    "SequenceParts",
    "cut_sequences",
    "gather_together",
]


@dataclass(frozen=True, slots=True)
class Cut:
    """How the tokens of a micro-batch are divided among ranks."""

    context: int = 1
    """Ranks that each have a part of every sequence."""
    rank: int = 0
    """Rank of this process among them."""
    tokens: int = 1
    """Divisor of the number of a rank's tokens: ranks of sequence parallelism."""

    @property
    def multiple(self) -> int:
        """Number that the length of each sequence must be a multiple of."""
        return 1 if self.context == 1 else 2 * self.context

    def padded(self, length: int) -> int:
        """Return the length of a sequence with its padding."""
        return -(-length // self.multiple) * self.multiple


@dataclass(frozen=True, slots=True)
class SequenceParts:
    """This rank's part of packed sequences, and the place of the rest.

    Row numbers are host tensors, int64. What is gathered has the rows of rank 0, then those of rank 1, ...
    """

    lengths: tuple[int, ...]
    """Lengths of the packed sequences with their padding; the last may be padding alone."""
    own_lengths: tuple[int, ...]
    """Lengths of this rank's chunks, in the order of its tokens."""
    key_lengths: tuple[int, ...]
    """Number of keys that each chunk attends to: its sequence up to the end of the chunk, with a prompt that
    it shares."""
    own_rows: Tensor
    """``[T / C]``: which rows of the packed sequences this rank's tokens are."""
    whole_rows: Tensor
    """``[T]``: which gathered row each row of the packed sequences is."""
    key_rows: Tensor
    """``[sum(key_lengths)]``: which gathered rows the chunks attend to."""

    @property
    def is_whole(self) -> bool:
        """Whether this rank has every token."""
        return len(self.own_rows) == len(self.whole_rows)

    @property
    def is_self_contained(self) -> bool:
        """Whether each sequence attends to itself alone, and lies whole on this rank."""
        return self.is_whole and self.key_lengths == self.own_lengths

    def attending(self, key_lengths: tuple[int, ...], key_rows: Tensor) -> SequenceParts:
        """Return the same with sequences that attend to others too; not under context parallelism.

        :param key_lengths: Number of keys of each sequence but the one that is padding alone.
        :param key_rows: ``[sum(key_lengths)]``, which rows of the packed sequences these are.
        """
        assert self.is_whole
        padding = self.lengths[len(key_lengths) :]
        rows = self.own_rows[len(self.own_rows) - sum(padding) :]
        return replace(self, key_lengths=(*key_lengths, *padding), key_rows=torch.cat((key_rows, rows)))

    def local(self, rows: Tensor) -> Tensor:
        """Map rows of the packed sequences to this rank's tokens, -1 for other ranks' tokens."""
        where = torch.full((sum(self.lengths),), -1, dtype=torch.int64)
        where.index_copy_(0, self.own_rows, torch.arange(len(self.own_rows)))
        return where.index_select(0, rows)


def cut_sequences(lengths: Sequence[int], cut: Cut) -> SequenceParts:
    """Cut packed sequences, padded so that they can be.

    :param lengths: Without padding.
    """
    sizes = _padded_lengths(lengths, cut)
    if cut.context == 1:
        rows = torch.arange(sum(sizes))
        return SequenceParts(sizes, sizes, sizes, rows, rows, rows)
    starts = torch.tensor([0, *accumulate(sizes)][:-1])
    size = torch.tensor(sizes) // (2 * cut.context)
    own_lengths = tuple(size.repeat_interleave(2).tolist())
    own_rows = [
        ranges(_starts(starts, size, _own_chunks(cut, rank)), own_lengths) for rank in range(cut.context)
    ]
    whole_rows = torch.empty(sum(sizes), dtype=torch.int64)
    whole_rows.index_copy_(0, torch.cat(own_rows), torch.arange(sum(sizes)))
    ends = torch.stack([size * (chunk + 1) for chunk in _own_chunks(cut, cut.rank)], dim=1)
    key_lengths = tuple(ends.flatten().tolist())
    return SequenceParts(
        lengths=sizes,
        own_lengths=own_lengths,
        key_lengths=key_lengths,
        own_rows=own_rows[cut.rank],
        whole_rows=whole_rows,
        key_rows=whole_rows.index_select(0, ranges(starts.repeat_interleave(2), key_lengths)),
    )


def _padded_lengths(lengths: Sequence[int], cut: Cut) -> tuple[int, ...]:
    """Return the length of each sequence and, where the sum does not fit, one more of padding alone."""
    sizes = tuple(map(cut.padded, lengths))
    extra = 0
    while (sum(sizes) + extra) // cut.context % cut.tokens:
        extra += cut.multiple
    return (*sizes, extra) if extra else sizes


def _own_chunks(cut: Cut, rank: int) -> tuple[int, ...]:
    """Return which chunks of every sequence a rank has."""
    return rank, 2 * cut.context - 1 - rank


def _starts(starts: Tensor, size: Tensor, chunks: tuple[int, ...]) -> Tensor:
    return torch.stack([starts + size * chunk for chunk in chunks], dim=1).flatten()


# -------------------------------------------------------------------------
# Collectives
# -------------------------------------------------------------------------


def gather_together(
    tensors: Sequence[Tensor], rows: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, ...]:
    """Gather rows from the ranks of a group. One collective, and one in backward.

    :param tensors: ``[T, F, ...]`` each, of the same shape on every rank, and of one dtype.
    :param rows: ``[S]``, int64, numbers of gathered rows; each rank may ask for others, and for some twice.
    :param group: ``None`` for this rank alone, without a collective.
    :returns: ``[S, F, ...]`` each.
    """
    gathered: tuple[Tensor, ...] = _GatherRows.apply(rows, group, *tensors)
    return gathered


class _GatherRows(torch.autograd.Function):
    """Each rank's gradient of what it asked for goes back to the ranks that have the rows."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the rows."""
        ctx.group = group
        ctx.save_for_backward(rows)
        ctx.count = len(tensors[0])
        if group is None:
            return tuple(x.index_select(0, rows) for x in tensors)
        own = torch.cat([x.flatten(1) for x in tensors], dim=1)
        gathered = own.new_empty(len(own) * dist.get_world_size(group), own.shape[1])
        dist.all_gather_into_tensor(gathered, own, group=group)
        parts = gathered.split([prod(x.shape[1:]) for x in tensors], dim=1)
        return tuple(
            part.index_select(0, rows).unflatten(1, x.shape[1:])
            for part, x in zip(parts, tensors, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of this rank's rows, summed over the group in float32."""
        (rows,) = ctx.saved_tensors
        widths = [prod(grad.shape[1:]) for grad in grads]
        total = ctx.count * (1 if ctx.group is None else dist.get_world_size(ctx.group))
        gathered = grads[0].new_zeros(total, sum(widths), dtype=torch.float32)
        for part, grad in zip(gathered.split(widths, dim=1), grads, strict=True):
            part.index_add_(0, rows, grad.flatten(1).float())
        own = gathered
        if ctx.group is not None:
            own = gathered.new_empty(ctx.count, sum(widths))
            dist.reduce_scatter_tensor(own, gathered, group=ctx.group)
        parts = zip(own.split(widths, dim=1), grads, strict=True)
        return None, None, *(part.unflatten(1, grad.shape[1:]).to(grad.dtype) for part, grad in parts)
