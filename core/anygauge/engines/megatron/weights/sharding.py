"""Sharding of canonical tensors: pure functions, the same for loading, saving and sync.

A tensor is divided along one dimension into as many shards as tensor parallelism has ranks (expert tensor
parallelism for experts). Each part of it, such as gate and up, is divided by itself; of a tensor that is
interleaved by query groups, or made of tensors that are, a rank has whole groups. Since each Hugging Face
tensor is divided the same way, a rank's shard is the transform of its shares of them, and nothing else has to
be read. Only of more ranks than groups each has a part of one, which mixes queries, keys and values: the
group is read, and cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from anygauge_hooks.megatron import WeightRule

__all__ = [
    "CanonicalTensors",
    "ShardPosition",
    "division_problem",
    "global_expert",
    "hf_ranges",
    "local_shape",
    "merge",
    "padded_vocab",
    "part_sizes",
    "ranks_of_group",
    "shard",
    "stretches",
]


@runtime_checkable
class CanonicalTensors(Protocol):
    """A module that stores its tensors otherwise than under canonical names.

    Example::

        class StackedExperts(nn.Module):
            def canonical_tensors(self) -> Mapping[str, Tensor]:
                return {
                    f"linear_fc1.weight{global_expert(local, self.ep_rank, len(self.fc1))}": self.fc1[local]
                    for local in range(len(self.fc1))
                }
    """

    def canonical_tensors(self) -> Mapping[str, Tensor]:
        """Return views of this rank's tensors, the module's children's included.

        :returns: Views by canonical name relative to the module, with global indices of experts. Writing to
            one writes to what the module stores.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPosition:
    """Position of a rank in the groups that shard tensors."""

    tensor: int = 1
    """Ranks that divide what all tokens use."""
    tensor_rank: int = 0
    expert_tensor: int = 1
    """Ranks that divide each expert."""
    expert_tensor_rank: int = 0
    expert: int = 1
    """Ranks that divide the experts among them."""
    expert_rank: int = 0
    stages: int = 1
    """Ranks that divide the layers among them."""

    def ways(self, rule: WeightRule) -> int:
        """Return the number of shards of a rule's tensor."""
        if rule.split_dim is None:
            return 1
        return self.expert_tensor if rule.experts else self.tensor

    def index(self, rule: WeightRule) -> int:
        """Return which of the shards this rank has."""
        if rule.split_dim is None:
            return 0
        return self.expert_tensor_rank if rule.experts else self.tensor_rank


def global_expert(local: int, expert_rank: int, experts_per_rank: int) -> int:
    """Return the index among all experts of one that a rank holds. It is computed nowhere else."""
    return expert_rank * experts_per_rank + local


def padded_vocab(vocab_size: int, ways: int) -> int:
    """Return the rows of an embedding that ``ways`` ranks split evenly."""
    return -(-vocab_size // ways) * ways


def part_sizes(rule: WeightRule, number: int, size: int) -> tuple[int, ...]:
    """Return the sizes of the parts of one Hugging Face tensor along the dimension that is divided.

    :param number: Which of the rule's tensors.
    :param size: Size of the tensor along the dimension.
    """
    return rule.sections[number] if rule.sections else (size,)


def hf_ranges(rule: WeightRule, number: int, size: int, ways: int, index: int) -> list[tuple[int, int]]:
    """Return the ranges of a Hugging Face tensor that one shard consists of.

    :param number: Which of the rule's tensors.
    :param size: Size of the tensor along the dimension that is divided.
    """
    if ways == 1:
        return [(0, size)]
    if rule.pads_vocab:
        rows = padded_vocab(size, ways) // ways
        return [(min(index * rows, size), min((index + 1) * rows, size))]
    # A rank's groups, each with its share of every part, are one stretch.
    parts = (size,) if rule.transform == "deinterleave" else part_sizes(rule, number, size)
    starts = accumulate(parts, initial=0)
    return [
        (start + part * index // ways, start + part * (index + 1) // ways)
        for start, part in zip(starts, parts, strict=False)
    ]


def ranks_of_group(rule: WeightRule, ways: int) -> int:
    """Return how many ranks have a part of the same query group: more than one where groups are fewer."""
    return max(1, ways // rule.groups) if rule.transform == "interleave" else 1


def shard(rule: WeightRule, tensor: Tensor, ways: int, index: int) -> Tensor:
    """Return one rank's shard of a canonical tensor; a view where it has one part.

    :param tensor: Whole, without padding.
    """
    if ways == 1 or rule.split_dim is None:
        return tensor
    if rule.pads_vocab:
        tensor = _padded(tensor, padded_vocab(tensor.shape[0], ways))
    pieces = [part.chunk(ways, rule.split_dim)[index] for part in _parts(rule, tensor, 1)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, rule.split_dim)


def merge(rule: WeightRule, shards: Sequence[Tensor], rows: int | None = None) -> Tensor:
    """Return the canonical tensor of all its shards; the inverse of :func:`shard`.

    :param rows: Number of rows of a vocabulary that are no padding.
    """
    tensor = shards[0]
    if len(shards) > 1:
        assert rule.split_dim is not None
        parts = zip(*(_parts(rule, each, len(shards)) for each in shards), strict=True)
        tensor = torch.cat([piece for part in parts for piece in part], rule.split_dim)
    return tensor[:rows] if rule.pads_vocab and rows is not None else tensor


def stretches(rule: WeightRule, size: int, ways: int, index: int) -> list[tuple[int, int]]:
    """Return which stretches of a canonical tensor, one after another, are one rank's shard of it.

    :param size: Size of the tensor along the dimension that is divided, without padding.
    """
    if ways == 1 or rule.split_dim is None:
        return [(0, size)]
    if rule.pads_vocab:
        return hf_ranges(rule, 0, size, ways, index)
    parts = [part for sizes in rule.sections for part in sizes] if rule.transform != "interleave" else []
    sizes = parts or [size]
    return [
        (start + part * index // ways, start + part * (index + 1) // ways)
        for start, part in zip(accumulate(sizes, initial=0), sizes, strict=False)
    ]


def local_shape(rule: WeightRule, shape: Sequence[int], ways: int) -> tuple[int, ...]:
    """Return the shape of a shard.

    :param shape: Shape of the canonical tensor, without padding.
    """
    local = list(shape)
    if rule.split_dim is not None:
        size = padded_vocab(shape[0], ways) if rule.pads_vocab else shape[rule.split_dim]
        local[rule.split_dim] = size // ways
    return tuple(local)


def division_problem(rule: WeightRule, shape: Sequence[int], ways: int) -> str | None:
    """Return why a canonical tensor cannot be divided, if so.

    :param shape: Shape of the canonical tensor, without padding.
    """
    if ways == 1 or rule.split_dim is None or rule.pads_vocab:
        return None
    if rule.transform == "interleave":
        rows = shape[rule.split_dim]
        if rule.groups % ways == 0 or (ways % rule.groups == 0 and rows % ways == 0):
            return None
        return f"{rule.groups} query groups of {rows} rows do not divide by {ways}"
    if rule.transform == "deinterleave":
        return f"{rule.groups} groups of rows do not divide by {ways}" if rule.groups % ways else None
    parts = [size for sizes in rule.sections for size in sizes] or [shape[rule.split_dim]]
    odd = [str(part) for part in parts if part % ways]
    return f"{', '.join(odd)} along dimension {rule.split_dim} do not divide by {ways}" if odd else None


def _parts(rule: WeightRule, tensor: Tensor, ways: int) -> Sequence[Tensor]:
    """Return the parts of a canonical tensor, or of one of ``ways`` shards, that are divided one by one."""
    sizes = [size // ways for part in rule.sections for size in part]
    if rule.transform == "interleave" or len(sizes) < 2:
        return [tensor]
    assert rule.split_dim is not None
    return tensor.split(sizes, rule.split_dim)


def _padded(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
