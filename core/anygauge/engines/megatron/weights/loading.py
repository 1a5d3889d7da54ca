"""Load Hugging Face tensors into a sharded model.

Each rank reads what it has and no more, after all ranks have agreed that everything fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from anygauge.distributed.all_gather import all_gather_values
from anygauge.engines.megatron.weights.mapping import (
    SHOWN,
    StackSource,
    TensorRule,
    TensorSource,
    canonical_shape,
    copied_embedding,
    division_problems,
    mapping_error,
    name_problems,
    tied_problem,
    to_canonical,
)
from anygauge.engines.megatron.weights.sharding import ShardPosition, hf_ranges, local_shape, ranks_of_group
from anygauge.engines.megatron.weights.stacks import straight

__all__ = ["load_weights", "read_shard"]

TYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Dtypes of weights. Narrower numbers need scales, which no family has."""
BYTES_AS_TEXT = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
_REPORT = TypeAdapter(tuple[bytes, list[str], int], config=BYTES_AS_TEXT)
"""Report of one rank: a bit mask of the rules whose tensors it has, its first problems, and the number of
problems."""


def load_weights(
    stored: Mapping[str, Tensor],
    rules: Sequence[TensorRule],
    source: TensorSource,
    place: ShardPosition,
    *,
    unused: Sequence[str] = (),
    tied: tuple[str, str] | None = None,
) -> None:
    """Copy Hugging Face tensors into this rank's tensors. A collective.

    :param stored: Tensors by canonical name.
    :param rules: Rules of the whole model.
    :param place: Position of this rank.
    :param unused: How names begin that the checkpoint may have and the model does not need.
    :param tied: Names of the embedding and of the output layer, which must be the same if it is there.
    :raises WeightMappingError: Lists every tensor that is missing, unexpected, of a wrong shape, or held by
        no rank or by too many; on every rank, and nothing was copied.
    """
    held = [rule for rule in rules if rule.canonical in stored]
    problems = [
        *name_problems(rules, source.names, unused),
        *_unwritten(stored, held),
        *_misfits(stored, held, source, place),
        *(_untied(held, source, place, tied) if tied else ()),
    ]
    _agree(problems, rules, stored, place)
    with torch.no_grad():
        for rule in held:
            read_shard(stored[rule.canonical], rule, source, place)


def _unwritten(stored: Mapping[str, Any], held: Sequence[TensorRule]) -> Iterator[str]:
    for name in sorted(set(stored) - {rule.canonical for rule in held}):
        yield f"{name}: a parameter that no rule writes"


def _misfits(
    stored: Mapping[str, Tensor], held: Sequence[TensorRule], source: TensorSource, place: ShardPosition
) -> Iterator[str]:
    names = source.names
    for rule in held:
        if not names.issuperset(rule.hf):
            continue
        if odd := {source.dtype(name) for name in rule.hf} - TYPES:
            wrong, right = (", ".join(sorted(map(str, each))) for each in (odd, TYPES))
            yield f"{' + '.join(rule.hf)}: of type {wrong}, and a weight has one of {right}"
            continue
        try:
            whole = canonical_shape(rule, [straight(source, rule).shape(name) for name in rule.hf])
        except ValueError as error:
            yield f"{' + '.join(rule.hf)}: {error}"
            continue
        ways, shape = place.ways(rule.declared), tuple(stored[rule.canonical].shape)
        yield from (undivided := list(division_problems([(rule, whole, ways)])))
        if not undivided and (here := local_shape(rule.declared, whole, ways)) != shape:
            yield f"{' + '.join(rule.hf)}: shape {here}, the model has {shape}"


def _untied(
    held: Sequence[TensorRule], source: TensorSource, place: ShardPosition, tied: tuple[str, str]
) -> Iterator[str]:
    """Yield that the output layer differs from the embedding, in this rank's rows of it."""
    embedding, output = tied
    for rule in held:
        if rule.hf == (embedding,) and source.names.issuperset(tied):
            size, declared = source.shape(embedding)[0], rule.declared
            for start, end in hf_ranges(declared, 0, size, place.ways(declared), place.index(declared)):
                if problem := tied_problem(embedding, output, source, start, end):
                    yield problem


def _agree(
    problems: Sequence[str], rules: Sequence[TensorRule], stored: Mapping[str, Any], place: ShardPosition
) -> None:
    """Raise on every rank if anything is wrong on one."""
    held = np.array([rule.canonical in stored for rule in rules], dtype=bool)
    reports = all_gather_values((np.packbits(held).tobytes(), list(problems[:SHOWN]), len(problems)), _REPORT)
    holders = np.sum(
        [np.unpackbits(np.frombuffer(bits, np.uint8), count=len(rules)) for bits, *_ in reports], 0
    )
    listed = dict.fromkeys(chain.from_iterable(texts for _, texts, _ in reports))
    listed |= dict.fromkeys(_wrongly_held(rules, holders.tolist(), place, len(reports)))
    if listed:
        raise mapping_error(list(listed))


def _wrongly_held(
    rules: Sequence[TensorRule], holders: Sequence[int], place: ShardPosition, world_size: int
) -> Iterator[str]:
    copied = copied_embedding(rules) if place.stages > 1 else None
    for rule, count in zip(rules, holders, strict=True):
        wanted = world_size // place.stages // (place.expert if rule.declared.experts else 1)
        copies = 2 if rule.canonical == copied else 1
        if count == 0:
            yield f"{rule.canonical}: a rule that writes no parameter"
        elif count != wanted * copies:
            yield f"{rule.canonical}: held by {count} ranks, and {wanted * copies} should hold it"


def read_shard(target: Tensor, rule: TensorRule, source: StackSource, place: ShardPosition) -> None:
    """Write a rank's shard of a tensor, read from a checkpoint that has been checked."""
    declared = rule.declared
    ways, index, dim = place.ways(declared), place.index(declared), declared.split_dim or 0
    start = (rule.expert,) if rule.is_stacked else ()
    stacks = straight(source, rule)
    sharing = ranks_of_group(declared, ways)
    ranges = [
        hf_ranges(declared, number, stacks.shape(name)[dim + len(start)], ways // sharing, index // sharing)
        for number, name in enumerate(rule.hf)
    ]
    shares = [
        [stacks.read(name, (*start, *[slice(None)] * dim, slice(*each))) for each in stretches]
        for name, stretches in zip(rule.hf, ranges, strict=True)
    ]
    if declared.transform in ("interleave", "deinterleave"):
        groups = to_canonical(declared, [torch.cat(share) for share in shares], ways // sharing)
        target.copy_(groups.chunk(sharing)[index % sharing])
        return
    filled = 0
    for piece in chain.from_iterable(shares):
        target.narrow(dim, filled, piece.shape[dim]).copy_(piece)
        filled += piece.shape[dim]
    target.narrow(dim, filled, target.shape[dim] - filled).zero_()
