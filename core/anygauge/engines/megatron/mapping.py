"""Weights between Hugging Face names and Megatron parameters, by the model's declared rules.

Two steps, each the exact inverse of the other: rules turn Hugging Face tensors into canonical tensors, whose
names are Transformer Engine's; :func:`canonical_name` says where a module of ours stores one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from anygauge.engines.megatron.spec import CANONICAL_PREFIXES
from anygauge_hooks.errors import WeightMappingError
from anygauge_hooks.models import WeightRule

__all__ = [
    "TensorSource",
    "canonical_name",
    "expand_rules",
    "from_canonical",
    "load_parameters",
    "to_canonical",
]


class TensorSource(Protocol):
    """A checkpoint whose tensors are read by name."""

    @property
    def names(self) -> set[str]:
        """Return every tensor's name."""

    def shape(self, name: str) -> Sequence[int]:
        """Return a tensor's shape without reading it."""

    def __call__(self, name: str) -> Tensor:
        """Read a tensor."""


def canonical_name(parameter: str) -> str:
    """Return the canonical name of a parameter of the model."""
    for stored, canonical in CANONICAL_PREFIXES.items():
        parameter = parameter.replace(f".{stored}", f".{canonical}")
    return parameter


def expand_rules(rules: Sequence[WeightRule], num_layers: int) -> list[WeightRule]:
    """Return the rules with ``{layer}`` filled in: the embedding, layer by layer, the rest."""
    first = [rule for rule in rules if rule.canonical.startswith("embedding.")]
    layers = [rule for rule in rules if "{layer}" in rule.canonical]
    rest = [rule for rule in rules if rule not in first and rule not in layers]
    per_layer = [_fill(rule, layer) for layer in range(num_layers) for rule in layers]
    return [*first, *per_layer, *rest]


def _fill(rule: WeightRule, layer: int) -> WeightRule:
    return replace(
        rule,
        canonical=rule.canonical.format(layer=layer),
        hf=tuple(name.format(layer=layer) for name in rule.hf),
    )


def to_canonical(rule: WeightRule, tensors: Sequence[Tensor], groups: int) -> Tensor:
    """Return the canonical tensor of a rule.

    :param tensors: The Hugging Face tensors, in the rule's order.
    :param groups: Number of query groups (key/value heads).
    """
    if rule.transform == "interleave_qkv":
        parts = [tensor.unflatten(0, (groups, -1)) for tensor in tensors]
        return torch.cat(parts, dim=1).flatten(0, 1)
    if rule.transform == "concat_gate_up":
        return torch.cat(list(tensors))
    return tensors[0]


def from_canonical(rule: WeightRule, tensor: Tensor, groups: int, heads_per_group: int) -> list[Tensor]:
    """Return the Hugging Face tensors of a rule; the inverse of :func:`to_canonical`.

    :param heads_per_group: Query heads in each group.
    """
    if rule.transform == "interleave_qkv":
        size = tensor.shape[0] // (groups * (heads_per_group + 2))
        parts = tensor.unflatten(0, (groups, -1)).split([heads_per_group * size, size, size], dim=1)
        return [part.flatten(0, 1).contiguous() for part in parts]
    if rule.transform == "concat_gate_up":
        return [part.contiguous() for part in tensor.chunk(2)]
    return [tensor]


def load_parameters(
    parameters: Mapping[str, Tensor],
    rules: Sequence[WeightRule],
    source: TensorSource,
    groups: int,
    *,
    ignored: set[str],
) -> None:
    """Copy Hugging Face tensors into parameters; every tensor is used once and every parameter written once.

    :param parameters: By Megatron name.
    :param rules: Expanded rules.
    :param source: The checkpoint.
    :param groups: Number of query groups.
    :param ignored: Names that the checkpoint may have and the model does not need.
    :raises WeightMappingError: Lists every missing, unexpected and wrong-shaped tensor; nothing was copied.
    """
    stored = {canonical_name(name): parameter for name, parameter in parameters.items()}
    problems = list(_name_problems(stored, rules, source.names - ignored))
    problems = problems or list(_shape_problems(stored, rules, source, groups))
    if problems:
        raise _mapping_error(problems)
    with torch.no_grad():
        for rule in rules:
            tensors = [source(name) for name in rule.hf]
            stored[rule.canonical].copy_(to_canonical(rule, tensors, groups))


def _name_problems(stored: Mapping[str, Any], rules: Sequence[WeightRule], names: set[str]) -> Iterator[str]:
    wanted = {name for rule in rules for name in rule.hf}
    covered = {rule.canonical for rule in rules}
    for label, found in (
        ("missing in the checkpoint", wanted - names),
        ("in the checkpoint but unknown to the model", names - wanted),
        ("a parameter that no rule writes", set(stored) - covered),
        ("a rule that writes no parameter", covered - set(stored)),
    ):
        yield from (f"{name}: {label}" for name in sorted(found))


def _shape_problems(
    stored: Mapping[str, Tensor], rules: Sequence[WeightRule], source: TensorSource, groups: int
) -> Iterator[str]:
    for rule in rules:
        empty = [torch.empty(source.shape(name), device="meta") for name in rule.hf]
        names, wanted = " + ".join(rule.hf), tuple(stored[rule.canonical].shape)
        try:
            found = tuple(to_canonical(rule, empty, groups).shape)
        except RuntimeError as error:
            yield f"{names}: shapes that do not combine ({error})"
        else:
            if found != wanted:
                yield f"{names}: shape {found}, the model has {wanted}"


def _mapping_error(problems: Sequence[str]) -> WeightMappingError:
    shown = "\n    ".join(problems[:20])
    more = f"\n    ... and {len(problems) - 20} more" if len(problems) > 20 else ""
    return WeightMappingError(
        f"{len(problems)} weights do not fit the model:\n    {shown}{more}",
        hint="Check that config.json belongs to these safetensors files.",
    )
