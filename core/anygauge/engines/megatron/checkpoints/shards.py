"""This rank's shards of the model and of the optimizer state, under canonical names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from anygauge.engines.checkpoint_files import WEIGHT, Region
from anygauge.engines.megatron.weights.mapping import TensorRule, is_embedding
from anygauge.engines.megatron.weights.sharding import ShardPosition, stretches
from anygauge.kernels.remainders import join, split
from anygauge_hooks.errors import CheckpointError

__all__ = [
    "MAIN",
    "LocalTensor",
    "Shard",
    "TensorSlice",
    "held_tensors",
    "kept_parts",
    "optimizer_shards",
    "part_state",
]

MAIN = "main"
"""The kind of the optimizer's own copy of the weights."""


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor of this rank."""

    name: str
    """Canonical."""
    tensor: Tensor
    """A parameter or buffer, or a view of a part of one."""
    region: Region
    owner: Tensor
    """The parameter or buffer."""
    offset: int
    """First element in the owner."""
    is_first: bool
    """Whether no rank before this one has the same region, but for data parallelism."""
    is_first_owner: bool
    """Whether this is the first of the ranks that divide the optimizer's state for it."""

    @property
    def whole(self) -> TensorSlice:
        """Return all of it."""
        return TensorSlice(self, 0, self.region.elements, slice(0, self.region.elements))


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of a tensor of this rank."""

    held: LocalTensor
    start: int
    end: int
    inside: slice
    """Its elements in what the optimizer updates."""

    @property
    def key(self) -> tuple[str, Region, int, int]:
        """Return the key for a reader of pieces."""
        return self.held.name, self.held.region, self.start, self.end

    @property
    def weight(self) -> Tensor:
        """The model's values, flat."""
        return self.held.tensor.detach().view(-1)[self.start : self.end]


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a parameter that this rank's optimizer updates."""

    parts: Sequence[TensorSlice]
    """Slices of the canonical tensors that the parameter consists of."""
    main: Tensor
    """Main weights that the optimizer updates: a view of the parameter, a float32 copy of the part, or int16
    remainders that complete it to float32."""
    is_copy: bool
    inner: torch.optim.Optimizer

    def copy_of(self, part: TensorSlice) -> Tensor:
        """Return the float32 copy of one of the parts, flat."""
        own = self.main.detach().view(-1)[part.inside]
        return join(part.weight, own) if own.dtype == torch.int16 else own

    def restore(self, part: TensorSlice, values: Tensor) -> None:
        """Write the float32 copy of one of the parts, and beside remainders the model's weights."""
        main = self.main.detach().view(-1)[part.inside]
        if main.dtype == torch.int16:
            weights, values = split(values)
            part.weight.copy_(weights)
        main.copy_(values)


def held_tensors(
    chunks: Sequence[nn.Module],
    tensors: Mapping[str, Tensor],
    rules: Sequence[TensorRule],
    place: ShardPosition,
) -> list[LocalTensor]:
    """Return this rank's tensors of a model.

    :param tensors: Tensors of the chunks, by canonical name.
    :param rules: Rules of the whole model; a tensor without one is not divided.
    :raises CheckpointError: A module stores a tensor in a way that no checkpoint can describe.
    """
    known = {rule.canonical: rule for rule in rules}
    owners = _Owners(chunks)
    return [_held(name, tensor, known.get(name), owners, place) for name, tensor in tensors.items()]


def _held(
    name: str, tensor: Tensor, rule: TensorRule | None, owners: _Owners, place: ShardPosition
) -> LocalTensor:
    owner, offset = owners.find(name, tensor)
    experts = rule is not None and rule.declared.experts > 0
    return LocalTensor(
        name=name,
        tensor=tensor,
        region=Region.whole(tensor.shape) if rule is None else _region(rule, tensor.shape, place),
        owner=owner,
        offset=offset,
        is_first=_is_first(name, rule, place),
        is_first_owner=(
            parallel_state.get_expert_data_parallel_rank()
            if experts
            else parallel_state.get_data_parallel_rank(with_context_parallel=True)
        )
        == 0,
    )


def _region(rule: TensorRule, local: Sequence[int], place: ShardPosition) -> Region:
    declared, dim = rule.declared, rule.declared.split_dim or 0
    if not local:
        return Region.whole(local)
    ways, index = place.ways(declared), place.index(declared)
    size = local[dim] * ways if rule.rows is None else rule.rows
    return Region(
        shape=(*local[:dim], size, *local[dim + 1 :]),
        dim=dim,
        stretches=tuple(stretches(declared, size, ways, index)),
        size=local[dim],
    )


def _is_first(name: str, rule: TensorRule | None, place: ShardPosition) -> bool:
    """Return whether this rank is the first of those that hold the same region of a tensor alike.

    The last pipeline stage has a copy of an embedding that the output layer is tied to.
    """
    if is_embedding(name) and parallel_state.get_pipeline_model_parallel_rank() > 0:
        return False
    if rule is None or rule.declared.split_dim is None:
        experts = rule is not None and rule.declared.experts > 0
        return (place.expert_tensor_rank if experts else place.tensor_rank) == 0
    return True


class _Owners:
    """Finds the parameter or buffer that a view belongs to."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        tensors = [each for chunk in chunks for each in (*chunk.parameters(), *chunk.buffers())]
        self._by_identity = {id(each): each for each in tensors}
        self._by_place = {(each.device, each.data_ptr()): each for each in tensors if each.numel()}

    def find(self, name: str, tensor: Tensor) -> tuple[Tensor, int]:
        """Return the owner of a tensor, and which of its elements is the first."""
        base = tensor._base if tensor._base is not None else tensor
        for owner in (self._by_identity.get(id(tensor)), self._by_place.get((base.device, base.data_ptr()))):
            if owner is not None and tensor.is_contiguous() and owner.is_contiguous():
                offset = (tensor.data_ptr() - owner.data_ptr()) // owner.element_size()
                if 0 <= offset <= owner.numel() - tensor.numel():
                    return owner, offset
        raise CheckpointError(
            f"{name} is not a contiguous part of a parameter or buffer of the model.",
            hint="Let canonical_tensors of its module return such views, or set save.every to none.",
        )


def optimizer_shards(held: Sequence[LocalTensor], optimizer: MegatronOptimizer) -> Iterator[Shard]:
    """Yield the parameter shards that this rank's optimizer updates.

    :param held: All tensors of the model.
    :raises CheckpointError: The optimizer keeps its weights where they cannot be read.
    """
    tensors: defaultdict[int, list[LocalTensor]] = defaultdict(list)
    for each in held:
        tensors[id(each.owner)].append(each)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        updated = {main for group in part.optimizer.param_groups for main in group["params"]}
        for parameter, start, end, main in _shards_of(part):
            if main not in updated:
                raise CheckpointError(
                    f"{type(part.optimizer).__name__} keeps the weights in tensors of its own, so no "
                    "checkpoint can be made.",
                    hint="Let make_optimizer of the backend keep the tensors that it is given, or set "
                    "save.every to none.",
                )
            parts = [_part(each, start, end) for each in tensors[id(parameter)]]
            filled = [each for each in parts if each.end > each.start]
            if filled:
                yield Shard(filled, main, main.dtype != parameter.dtype, part.optimizer)


def _part(held: LocalTensor, start: int, end: int) -> TensorSlice:
    """Return the part of a tensor that is within some elements of its owner."""
    first, last = max(start, held.offset), min(end, held.offset + held.region.elements)
    return TensorSlice(held, first - held.offset, last - held.offset, slice(first - start, last - start))


def _shards_of(part: Any) -> Iterator[tuple[Tensor, int, int, Tensor]]:
    """Yield parameter, first and last element, and what the inner optimizer holds for them."""
    if hasattr(part, "shard_fp32_groups"):
        narrow = ((each, each.main_param) for each in chain(*part.model_float16_groups))
        wide = zip(chain(*part.model_fp32_groups), chain(*part.shard_fp32_groups), strict=True)
        for parameter, main in chain(narrow, wide):
            own = part._get_model_param_range_map(parameter)["param"]
            yield parameter, own.start, own.end, main
        return
    pairs = [(main, main) for group in part.optimizer.param_groups for main in group["params"]]
    if hasattr(part, "fp32_from_float16_groups"):
        halves = zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
        pairs = [pair for models, mains in halves for pair in zip(models, mains, strict=True)]
        pairs += [(main, main) for group in part.fp32_from_fp32_groups for main in group]
    for parameter, main in pairs:
        yield parameter, 0, parameter.numel(), main


def kept_parts(
    held: Sequence[LocalTensor], optimizer: MegatronOptimizer
) -> Iterator[tuple[TensorSlice, Shard | None]]:
    """Yield the parts that this rank saves, with their shards: no two ranks save the same element."""
    is_replicated = not any(
        hasattr(part, "shard_fp32_groups") for part in getattr(optimizer, "chained_optimizers", [optimizer])
    )
    for shard in optimizer_shards(held, optimizer):
        for part in shard.parts:
            if part.held.is_first and (part.held.is_first_owner or not is_replicated):
                yield part, shard
    for each in held:
        if each.is_first and each.is_first_owner and not each.owner.requires_grad:
            yield each.whole, None


def part_state(
    part: TensorSlice, shard: Shard | None, *, joined: bool = True
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the tensors of a part by kind, flat, and the numbers that the optimizer keeps for it.

    :param shard: Shard that the part is of; ``None`` for tensors that are not trained.
    :param joined: Whether a float32 copy is made of remainders; else they are what they are, to look at.
    :raises CheckpointError: The optimizer keeps something else.
    """
    tensors = {WEIGHT: part.weight}
    if shard is None:
        return tensors, {}
    if shard.is_copy:
        tensors[MAIN] = shard.copy_of(part) if joined else shard.main
    scalars: dict[str, float] = {}
    for name, value in shard.inner.state.get(shard.main, {}).items():
        if isinstance(value, Tensor) and value.dim() == 0:
            scalars[name] = value.item()
        elif isinstance(value, Tensor) and value.numel() == shard.main.numel():
            tensors[name] = value.view(-1)[part.inside]
        else:
            raise CheckpointError(
                f"{type(shard.inner).__name__} keeps {name} of {part.held.name} in an unknown form.",
                hint="A state is a tensor like the weight, or one number.",
            )
    return tensors, scalars
