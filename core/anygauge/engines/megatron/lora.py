"""LoRA on a Megatron model: adapters of its linears, under the names of peft.

The tensors of adapters have rules as all others of the model have. So they are read, divided, checked, saved
and gathered in the same ways.

Megatron imports happen here at module level: import this file only after ``prepare_megatron``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from pydantic import TypeAdapter
from torch import Tensor, nn

from anygauge.config.lora import LoraSettings, adapter_config, lora_settings
from anygauge.config.schema import Lora
from anygauge.config.tree import is_inside
from anygauge.distributed.all_gather import all_gather_values
from anygauge.engines.lora.base import AdapterState, checksum, first_values, index_sum, log_sizes
from anygauge.engines.lora.files import opened_adapter, write_adapter
from anygauge.engines.lora.layers import chosen_layers, distinct_names, full_modules
from anygauge.engines.megatron.checkpoints.shards import LocalTensor
from anygauge.engines.megatron.layers.adapter import NAME, LinearAdapter, add_adapter
from anygauge.engines.megatron.layers.latent_attention import ReplicatedLinear
from anygauge.engines.megatron.weights.loading import read_shard
from anygauge.engines.megatron.weights.mapping import OUTPUT, StackSource, TensorRule
from anygauge.engines.megatron.weights.sharding import ShardPosition, ranks_of_group
from anygauge.wording import listed
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.megatron import WeightRule

__all__ = ["Adapters", "Merged", "add_adapters"]

_LINEARS = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)
_WEIGHT = ".weight"
_NAMES = TypeAdapter(list[str])
_SHAPES = TypeAdapter(dict[str, list[int]])
_COUNT = TypeAdapter(int)


class Adapters(AdapterState):
    """The adapters of a model; without arguments, those of one that trains all weights."""

    def __init__(
        self,
        settings: LoraSettings | None = None,
        *,
        layers: Collection[str] = (),
        others: Collection[str] = (),
        saved: Sequence[str] = (),
        rules: Sequence[TensorRule] = (),
        saved_rules: Sequence[TensorRule] = (),
        by_weight: Mapping[str, LinearAdapter] | None = None,
    ) -> None:
        """Keep the adapters of a rank.

        :param layers: Names of the layers that have one in the whole model, as Hugging Face has them.
        :param others: Names of modules without one.
        :param saved: Names of the modules that are trained in full.
        :param rules: Rules of the adapters of the whole model.
        :param saved_rules: Rules of the weights of these modules.
        :param by_weight: This rank's adapters, by the canonical name of the linear's weight.
        """
        super().__init__(settings)
        self.layers, self._others, self._saved = layers, others, saved
        self.rules, self.trained_rules = tuple(rules), (*rules, *saved_rules)
        self.trains_others = bool(saved_rules)
        """Whether weights of the model itself are trained, on any rank."""
        self._by_weight = by_weight or {}
        self._names = {rule.canonical for rule in rules}

    def owns(self, canonical: str) -> bool:
        """Return whether a tensor is an adapter's."""
        return canonical in self._names

    def merged(self, canonical: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the model with its adapter's product added in float32, and rounded once.

        Others are returned as they are.
        """
        adapter = self._by_weight.get(canonical)
        return tensor if adapter is None else (tensor.float() + adapter.product()).to(tensor.dtype)

    @torch.no_grad()
    def start(
        self, held: Sequence[LocalTensor], place: ShardPosition, *, seed: int, path: Path | None
    ) -> None:
        """Give adapters their first values, and take the checksum of the base. A collective.

        ``A`` is uniform as peft has it, and ``B`` zero; a seed gives the same values on any number of ranks,
        and on the other engine.

        :param held: All tensors of this rank, with the values of the base.
        :param path: A peft adapter to start from, if there is one.
        :raises WeightMappingError: It does not fit the model.
        """
        base = [each for each in held if not self.owns(each.name)]
        self.checksum = _checksum(base)
        trained = {rule.canonical: rule for rule in self.trained_rules}
        mine = [each for each in held if each.name in trained]
        shapes = _hf_shapes(mine, trained)
        total, learning = (_count(each) for each in (held, mine))
        log_sizes(len(self.layers), learning, total)
        for each in mine:
            if self.owns(each.name):
                read_shard(each.tensor, trained[each.name], _FirstValues(shapes, seed), place)
        if path is not None:
            with opened_adapter(path, shapes) as source:
                for each in mine:
                    read_shard(each.tensor, trained[each.name], source, place)

    def write(self, target: Path, tensors: Iterator[tuple[str, Tensor]], base: Path) -> None:
        """Write a peft adapter. A collective; rank 0 writes.

        :param tensors: All that is trained, whole, under Hugging Face names, on rank 0.
        :param base: Directory of the weights that it belongs to.
        :raises CheckpointError: It cannot be written.
        """
        targets = distinct_names(self.layers, self._others)
        write_adapter(target, tensors, adapter_config(self.settings, base, targets, self._saved))


@dataclass(frozen=True, slots=True)
class Merged(Mapping[str, Tensor]):
    """Tensors of a model by canonical name, each merged with its adapter when it is taken."""

    tensors: Mapping[str, Tensor]
    adapters: Adapters

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor."""
        return self.adapters.merged(name, self.tensors[name])

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self.tensors)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.tensors)


# -------------------------------------------------------------------------
# Building
# -------------------------------------------------------------------------


def add_adapters(
    chunks: Sequence[nn.Module],
    tensors: Mapping[str, Tensor],
    rules: Sequence[TensorRule],
    place: ShardPosition,
    lora: Lora,
    *,
    tied: tuple[str, str] | None,
    sequence_parallel: bool,
) -> Adapters:
    """Freeze a model and add adapters to its linears. A collective.

    :param tensors: Tensors of this rank, by canonical name.
    :param rules: Rules of the whole model.
    :param tied: Hugging Face names of the embedding and of the output layer, if they are one tensor.
    :raises ConfigError: A target or a module to save matches nothing, or what cannot be trained so; on every
        rank.
    """
    settings, linears = lora_settings(lora), _linears(chunks, tensors)
    choice = _choose(_linear_rules(rules, linears), rules, lora, settings, tied)
    _check_groups(choice.parts, place)
    _freeze(chunks, tensors, choice.saved_rules)
    by_weight = {
        rule.canonical: LinearAdapter(
            tensors[rule.canonical],
            rule,
            parts,
            rank=settings.rank,
            scale=settings.scale,
            ways=place.ways(rule.declared),
            sequence_parallel=sequence_parallel,
        )
        for rule, parts in choice.parts.items()
        if rule.canonical in linears
    }
    adapters = Adapters(
        settings,
        layers=choice.layers,
        others=choice.others,
        saved=choice.saved,
        rules=[each for rule, parts in choice.parts.items() for each in _rules(rule, parts, settings.rank)],
        saved_rules=choice.saved_rules,
        by_weight=by_weight,
    )
    for canonical, adapter in by_weight.items():
        add_adapter(linears[canonical], adapter, adapters)
    return adapters


def _linears(chunks: Sequence[nn.Module], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the linears of a rank by the canonical names of their weights.

    :raises ConfigError: They are a provider's.
    """
    names = {id(tensor): name for name, tensor in tensors.items()}
    linears = {}
    for module in (module for chunk in chunks for module in chunk.modules()):
        weight = getattr(module, "weight", None)
        if isinstance(module, _LINEARS) and id(weight) in names:
            linears[names[id(weight)]] = module
        elif type(module).__name__.endswith("Linear") and id(weight) in names:
            raise ConfigError(
                f"LoRA has no adapters for {type(module).__module__}.{type(module).__name__}, the class of "
                f"{names[id(weight)]}.",
                hint="Leave train.provider out, or set train.engine = 'fsdp'.",
            )
    return linears


def _linear_rules(rules: Sequence[TensorRule], linears: Mapping[str, Any]) -> list[TensorRule]:
    """Return the rules of the linears that any rank has, but for those of experts. A collective."""
    everywhere = set().union(*all_gather_values(sorted(linears), _NAMES))
    return [rule for rule in rules if rule.canonical in everywhere and not rule.declared.experts]


@dataclass(frozen=True, slots=True)
class _Choice:
    """Trained parts of a model, by the names that Hugging Face has."""

    layers: Sequence[str]
    """Linear layers with an adapter."""
    others: Collection[str]
    """Modules without one."""
    saved: Sequence[str]
    """Modules that are trained in full."""
    saved_rules: Sequence[TensorRule]
    parts: Mapping[TensorRule, Sequence[int]]
    """Which Hugging Face tensors of a linear's rule are of these layers."""


def _choose(
    linears: Sequence[TensorRule],
    rules: Sequence[TensorRule],
    lora: Lora,
    settings: LoraSettings,
    tied: tuple[str, str] | None,
) -> _Choice:
    """Return the choice of a config, the same on every rank.

    :param linears: Rules of the linears' weights.
    :raises ConfigError: It matches nothing, or what cannot be trained so.
    """
    weights = _weights(rules, tied)
    saved = list(full_modules(lora, weights, settings.modules_to_save))
    names = [name.removesuffix(_WEIGHT) for rule in linears for name in rule.hf]
    layers = chosen_layers(lora, settings, names, _output_layer(rules, tied), saved)
    return _Choice(
        layers,
        others=weights.keys() - set(layers),
        saved=saved,
        saved_rules=list(_full_rules(rules, saved)),
        parts={rule: parts for rule in linears if (parts := _parts(rule, set(layers)))},
    )


def _weights(rules: Sequence[TensorRule], tied: tuple[str, str] | None) -> dict[str, list[str]]:
    """Return the names of a checkpoint's tensors by module, with an entry for each module around one."""
    own: dict[str, list[str]] = {}
    names = [(name, name) for rule in rules for name in rule.hf]
    for name, tensor in [*names, *([(tied[1], tied[0])] if tied else [])]:
        *outer, _ = name.split(".")
        for depth in range(1, len(outer) + 1):
            own.setdefault(".".join(outer[:depth]), [])
        own[".".join(outer)].append(tensor)
    return own


def _output_layer(rules: Sequence[TensorRule], tied: tuple[str, str] | None) -> str:
    """Return the Hugging Face name of the output layer."""
    names = [rule.hf[0] for rule in rules if f".{rule.canonical}".endswith(f".{OUTPUT}")]
    return (tied[1] if tied else names[0]).removesuffix(_WEIGHT)


def _full_rules(rules: Sequence[TensorRule], saved: Sequence[str]) -> Iterator[TensorRule]:
    """Yield the rules of the tensors that are trained in full.

    :raises ConfigError: Only a part of one is.
    """
    for rule in rules:
        inside = [name for name in rule.hf if is_inside(name, saved)]
        if inside and (len(inside) < len(rule.hf) or rule.declared.experts):
            others = [name for name in rule.hf if name not in inside] or ["the other experts"]
            raise ConfigError(
                f"train.lora.modules_to_save: {listed(inside)} is one tensor with {listed(others)} here.",
                hint="Give it an adapter, or use train.engine = 'fsdp'.",
            )
        if inside:
            yield rule


def _parts(rule: TensorRule, chosen: Collection[str]) -> list[int]:
    """Return which of a rule's Hugging Face tensors have an adapter."""
    return [part for part, name in enumerate(rule.hf) if name.removesuffix(_WEIGHT) in chosen]


def _check_groups(adapted: Collection[TensorRule], place: ShardPosition) -> None:
    """Check that each rank has whole query groups.

    :raises ConfigError: Several have a part of one, which mixes rows of queries, keys and values.
    """
    for rule in adapted:
        if ranks_of_group(rule.declared, place.ways(rule.declared)) > 1:
            raise ConfigError(
                f"train.parallel.tensor = {place.tensor} is more than the {rule.declared.groups} query "
                "groups, and an adapter cannot be divided within one.",
                hint=f"Set train.parallel.tensor = {rule.declared.groups} or less, or leave these out of "
                f"train.lora.targets: {listed(rule.hf)}.",
            )


def _freeze(chunks: Sequence[nn.Module], tensors: Mapping[str, Tensor], saved: Sequence[TensorRule]) -> None:
    for chunk in chunks:
        chunk.requires_grad_(False)
    for rule in saved:
        if isinstance(tensor := tensors.get(rule.canonical), nn.Parameter):
            tensor.requires_grad_(True)


def _rules(rule: TensorRule, parts: Sequence[int], rank: int) -> Iterator[TensorRule]:
    """Yield the rules of an adapter's tensors from that of the weight beside it."""
    declared, layer = rule.declared, f"{rule.canonical.removesuffix(_WEIGHT)}.{NAME}"
    is_row = declared.split_dim == 1
    names = {part: rule.hf[part].removesuffix(_WEIGHT) for part in parts}
    plain = {"transform": "copy", "groups": 1, "layers": None}
    downs = tuple(f"{name}.lora_A.weight" for name in names.values())
    fused = (
        {"transform": "concat", "sections": ((rank,),) * len(parts)} if len(parts) > 1 else {"sections": ()}
    )
    a = {**plain, **fused, "split_dim": 1 if is_row else None}
    yield _filled(declared, f"{layer}.A", downs, a)
    for part, name in names.items():
        sections = (_sections(declared, part),) if declared.sections and not is_row else ()
        b = {**plain, "sections": sections, "split_dim": None if is_row else declared.split_dim}
        end = name.rpartition(".")[2]
        yield _filled(declared, f"{layer}.B_{end}", (f"{name}.lora_B.weight",), b)


def _sections(declared: WeightRule, part: int) -> tuple[int, ...]:
    """Return the parts of a Hugging Face tensor that ranks divide one by one."""
    sections = declared.sections[part]
    return (sum(sections),) if declared.transform == "deinterleave" else sections


def _filled(
    declared: WeightRule, canonical: str, hf: tuple[str, ...], changes: Mapping[str, Any]
) -> TensorRule:
    return TensorRule(canonical, hf, replace(declared, canonical=canonical, hf=hf, **changes))


# -------------------------------------------------------------------------
# Values
# -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _FirstValues(StackSource):
    """Adapters that change nothing."""

    shapes: Mapping[str, Sequence[int]]
    seed: int

    def shape(self, name: str) -> Sequence[int]:
        return self.shapes[name]

    def read(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        shape = self.shapes[name]
        if name.endswith(".lora_A.weight"):
            return first_values(shape, f"{self.seed} {name}")[index]
        return torch.zeros(*shape)[index]


def _hf_shapes(held: Sequence[LocalTensor], rules: Mapping[str, TensorRule]) -> Mapping[str, Sequence[int]]:
    """Return the shapes of what the tensors of all ranks are made of, by Hugging Face name. A collective."""
    shapes: dict[str, list[int]] = {}
    for each in held:
        rule, (rows, *inner) = rules[each.name], each.region.shape
        is_one = rule.declared.transform == "copy"
        sizes = [rows] if is_one else [sum(sections) for sections in rule.declared.sections]
        shapes |= {name: [size, *inner] for name, size in zip(rule.hf, sizes, strict=True)}
    of_ranks = all_gather_values(shapes, _SHAPES)
    return {name: shape for shapes in of_ranks for name, shape in shapes.items()}


def _count(held: Sequence[LocalTensor]) -> int:
    """Return the number of elements that ranks have of the whole model, without padding. A collective."""
    regions = [each.region for each in _first(held)]
    own = sum(each.rows * each.inner * (last - first) for each in regions for first, last in each.stretches)
    return sum(all_gather_values(own, _COUNT))


def _first(held: Sequence[LocalTensor]) -> Iterator[LocalTensor]:
    """Yield what no rank before this one has."""
    yield from (each for each in held if each.is_first and each.is_first_owner)


def _checksum(held: Sequence[LocalTensor]) -> str:
    """Return a checksum of weights that does not depend on how ranks divide them. A collective."""
    facts = {each.name: f"{each.name} {each.tensor.dtype} {each.region.shape}" for each in held}
    of_ranks = sorted(set().union(*all_gather_values(sorted(facts.values()), _NAMES)))
    places = {fact: place for place, fact in enumerate(of_ranks)}
    sums = torch.zeros(len(of_ranks), dtype=torch.int64, device=held[0].tensor.device)
    for each in _first(held):
        sums[places[facts[each.name]]] = _sum(each)
    return checksum(of_ranks, sums)


def _sum(held: LocalTensor) -> Tensor:
    """Return what a rank adds to the checksum of a tensor: the sum of its part, without padding."""
    region, tensor = held.region, held.tensor.detach()
    indices = torch.cat([torch.arange(*each, device=tensor.device) for each in region.stretches])
    part = tensor.movedim(region.dim, 0) if tensor.dim() else tensor.view(1)
    return index_sum(part[: len(indices)].contiguous(), indices)
