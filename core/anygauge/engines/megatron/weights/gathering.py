"""Gather whole Hugging Face tensors from a sharded model.

It goes tensor by tensor, so that besides the model no more than one whole tensor is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from anygauge.distributed.all_gather import all_gather_values
from anygauge.engines.megatron.weights.loading import BYTES_AS_TEXT
from anygauge.engines.megatron.weights.mapping import TensorRule, hf_tensors, mapping_error
from anygauge.engines.megatron.weights.sharding import ShardPosition, merge

__all__ = ["Gathering", "plan_gathering"]

DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_FORMS = TypeAdapter(dict[int, tuple[tuple[int, ...], str]])
"""Shape and dtype of a shard, by number of its rule."""
_HELD = TypeAdapter(tuple[bytes, ShardPosition], config=BYTES_AS_TEXT)
"""The rules whose tensors a rank holds, as bits, and its place."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """A tensor of the model and the ranks that give its shards."""

    rule: TensorRule
    shape: tuple[int, ...]
    """Shape of a shard."""
    dtype: torch.dtype
    sources: tuple[int, ...]
    """Source rank of each shard."""
    sender: int
    """Rank that sends it, if ranks send what they hold: the first one that holds the first shard. A stack of
    experts is one tensor in a checkpoint, so the rank that sends its first expert sends all of it."""


@dataclass(frozen=True, slots=True)
class Gathering:
    """Plan for gathering whole tensors from a group's ranks; shapes and dtypes must not change."""

    tensors: Sequence[_Shared]
    rank: int
    ranks: Sequence[int]
    """Ranks of the group, which together hold all tensors."""
    group: dist.ProcessGroup | None
    device: torch.device

    def weights(
        self, stored: Mapping[str, Tensor], *, on_every_rank: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors under Hugging Face names, in the order of a checkpoint. A collective.

        Every rank must take all of them.

        :param stored: Tensors by canonical name; detached.
        :param on_every_rank: Or on rank 0 alone; the others get nothing, and must still iterate.
        """
        if on_every_rank or 0 in self.ranks:
            yield from hf_tensors(self._whole(stored, self.tensors, None if on_every_rank else 0))

    @property
    def senders(self) -> list[int]:
        """The ranks of the group that together send all tensors, in order."""
        return sorted({shared.sender for shared in self.tensors})

    def sent_by(self, sender: int, stored: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors that a rank sends, on that rank.

        The others get nothing, and must still iterate: those that divide a tensor with it give their shards.
        """
        tensors = [shared for shared in self.tensors if shared.sender == sender]
        return hf_tensors(self._whole(stored, tensors, sender))

    def _whole(
        self, stored: Mapping[str, Tensor], tensors: Sequence[_Shared], receiver: int | None
    ) -> Iterator[tuple[TensorRule, Tensor]]:
        """Yield whole tensors on one rank, or on every rank of the group where no receiver is named."""
        for shared in tensors:
            local = stored[shared.rule.canonical].contiguous() if self.rank in shared.sources else None
            shards = [
                self._receive(shared, source, local if source == self.rank else None, receiver)
                for source in shared.sources
            ]
            held = [shard for shard in shards if shard is not None]
            if receiver in (None, self.rank):
                yield shared.rule, merge(shared.rule.declared, held, shared.rule.rows)

    def _receive(
        self, shared: _Shared, source: int, local: Tensor | None, receiver: int | None
    ) -> Tensor | None:
        if receiver is None:
            shard = self._empty(shared) if local is None else local
            if len(self.ranks) > 1:
                dist.broadcast(shard, source, self.group)
            return shard
        if source != receiver and local is not None:
            dist.send(local, receiver)
        elif source != receiver and self.rank == receiver:
            shard = self._empty(shared)
            dist.recv(shard, source)
            return shard
        return local

    def _empty(self, each: _Shared) -> Tensor:
        return torch.empty(each.shape, dtype=each.dtype, device=self.device)


def plan_gathering(
    stored: Mapping[str, Tensor],
    rules: Sequence[TensorRule],
    place: ShardPosition,
    group: dist.ProcessGroup | None = None,
) -> Gathering:
    """Plan which ranks have which shards. A collective.

    :param stored: Tensors by canonical name; detached.
    :param rules: Rules of the whole model.
    :param place: Position of this rank.
    :param group: Ranks that hold everything together, this one among them; ``None`` means all ranks.
    :raises WeightMappingError: No rank of the group holds some tensor; on all of them.
    """
    rank, ranks = (dist.get_rank(), _ranks_of(group)) if dist.is_initialized() else (0, [0])
    sources = _sources(stored, rules, place, ranks, group)
    mine = {
        number: (tuple(stored[rule.canonical].shape), str(stored[rule.canonical].dtype))
        for number, (rule, by_shard) in enumerate(zip(rules, sources, strict=True))
        if by_shard[0] == rank
    }
    forms = {number: form for part in all_gather_values(mine, _FORMS, group) for number, form in part.items()}
    return Gathering(
        tensors=[
            _Shared(
                rule,
                shape=forms[number][0],
                dtype=DTYPES[forms[number][1]],
                sources=sources[number],
                sender=sources[number - (rule.expert or 0) if rule.is_stacked else number][0],
            )
            for number, rule in enumerate(rules)
        ],
        rank=rank,
        ranks=ranks,
        group=group,
        device=next(iter(stored.values())).device,
    )


def _ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)


def _sources(
    stored: Mapping[str, Any],
    rules: Sequence[TensorRule],
    place: ShardPosition,
    ranks: Sequence[int],
    group: dist.ProcessGroup | None,
) -> list[tuple[int, ...]]:
    """Return, for each rule, the first rank that holds each shard."""
    held = np.packbits([rule.canonical in stored for rule in rules])
    first: list[dict[int, int]] = [{} for _ in rules]
    told = all_gather_values((held.tobytes(), place), _HELD, group)
    for rank, (bits, where) in zip(ranks, told, strict=True):
        for number in np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), count=len(rules))).tolist():
            first[number].setdefault(where.index(rules[number].declared), rank)
    shards = [range(place.ways(rule.declared)) for rule in rules]
    absent = [rule for rule, by, ways in zip(rules, first, shards, strict=True) if len(by) < len(ways)]
    if absent:
        raise mapping_error([f"{rule.canonical}: not all of it is on the ranks" for rule in absent])
    return [tuple(by[index] for index in ways) for by, ways in zip(first, shards, strict=True)]
