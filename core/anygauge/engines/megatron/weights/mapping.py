"""Weight mapping between Hugging Face names and canonical ones, by the rules that a model declares.

A rule makes one canonical tensor of Hugging Face tensors; :func:`from_canonical` is the exact inverse of
:func:`to_canonical`. Neither knows about ranks: :mod:`anygauge.engines.megatron.weights.sharding` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from anygauge.engines.megatron.weights.sharding import division_problem, part_sizes
from anygauge_hooks.errors import WeightMappingError
from anygauge_hooks.megatron import WeightRule, megatron_model
from anygauge_hooks.models import ModelSpec

__all__ = [
    "EMBEDDING",
    "OUTPUT",
    "StackSource",
    "TensorRule",
    "TensorSource",
    "canonical_problem",
    "canonical_shape",
    "copied_embedding",
    "division_problems",
    "expand_rules",
    "from_canonical",
    "hf_tensors",
    "is_embedding",
    "left_out",
    "mapping_error",
    "model_rules",
    "name_problems",
    "set_problems",
    "tied_problem",
    "tied_weights",
    "to_canonical",
    "unused_prefixes",
]

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""Canonical names, relative to the module that has them."""
_LAYER = "{layer}"
_HF_OUTPUT = "lm_head.weight"
SHOWN = 20
"""Problems that an error lists."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorRule:
    """A declared rule, applied to one tensor: its names have no placeholders left."""

    canonical: str
    hf: tuple[str, ...]
    declared: WeightRule
    expert: int | None = None
    """Global index."""
    rows: int | None = None
    """Rows of a vocabulary that are not padding."""

    @property
    def is_stacked(self) -> bool:
        """Return whether the Hugging Face tensors hold all experts, of which this is one."""
        return self.expert is not None and not any("{expert}" in name for name in self.declared.hf)


def model_rules(spec: ModelSpec, hf: Mapping[str, Any]) -> list[TensorRule]:
    """Return the rules of every tensor of a model, in the order of its checkpoints.

    :raises WeightMappingError: Two rules make one tensor, or two use one.
    """
    model, vocab = megatron_model(spec), int(spec.model_options(hf)["vocab_size"])
    return expand_rules(model.weight_rules(hf), len(model.layers(hf)), vocab)


def expand_rules(
    rules: Sequence[WeightRule], num_layers: int, vocab_size: int | None = None
) -> list[TensorRule]:
    """Return a rule for each tensor: in the order of declaration, but layer by layer.

    :raises WeightMappingError: Two rules make one tensor, or two use one.
    """
    expanded: list[TensorRule] = []
    for stack, group in groupby(rules, key=lambda rule: rule.canonical.partition(_LAYER)[:2]):
        declared = list(group)
        numbers: Iterable[int | None] = range(_depth(declared, num_layers)) if stack[1] else (None,)
        expanded += [
            filled
            for layer in numbers
            for rule in declared
            if layer is None or rule.layers is None or layer in rule.layers
            for filled in _filled(rule, layer, vocab_size)
        ]
    _check_unique(expanded)
    return expanded


def _depth(rules: Sequence[WeightRule], num_layers: int) -> int:
    """Return how many layers a stack has; one that is not the decoder names all of its own."""
    named = [rule.layers for rule in rules]
    return (
        num_layers if None in named else 1 + max((max(each, default=0) for each in named if each), default=0)
    )


def _filled(rule: WeightRule, layer: int | None, vocab_size: int | None) -> Iterator[TensorRule]:
    rows = vocab_size if rule.pads_vocab else None
    for expert in range(rule.experts) if rule.experts else (None,):
        values = {"layer": layer, "expert": expert}
        names = tuple(name.format_map(values) for name in rule.hf)
        yield TensorRule(rule.canonical.format_map(values), names, rule, expert, rows)


def _check_unique(rules: Sequence[TensorRule]) -> None:
    made = Counter(rule.canonical for rule in rules)
    used = Counter((name, rule.expert if rule.is_stacked else None) for rule in rules for name in rule.hf)
    twice = [f"{name}: {count} rules make it" for name, count in made.items() if count > 1]
    twice += [f"{name}: {count} rules use it" for (name, _), count in used.items() if count > 1]
    if twice:
        raise mapping_error(twice, hint="Correct the weight rules of the model plugin.")


def unused_prefixes(spec: ModelSpec, hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return prefixes of checkpoint tensors that the model does not use."""
    tied = (_HF_OUTPUT,) if spec.model_options(hf)["tie_embeddings"] else ()
    return (*spec.unused_weights(hf), *tied)


def tied_weights(spec: ModelSpec, hf: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the Hugging Face names of the embedding and of the output layer, if they are one tensor."""
    if not spec.model_options(hf)["tie_embeddings"]:
        return None
    for rule in megatron_model(spec).weight_rules(hf):
        if is_embedding(rule.canonical):
            return rule.hf[0], _HF_OUTPUT
    return None


def is_embedding(canonical: str) -> bool:
    """Return whether this names the embedding of a vocabulary, wherever in the model it is."""
    return f".{canonical}".endswith(f".{EMBEDDING}")


def copied_embedding(rules: Sequence[TensorRule]) -> str | None:
    """Return the canonical name of the embedding that is the output layer too, if there is one.

    Under pipeline parallelism the last stage has a copy of it.
    """
    names = {rule.canonical for rule in rules}
    embeddings = [rule.canonical for rule in rules if is_embedding(rule.canonical)]
    return next((name for name in embeddings if name.removesuffix(EMBEDDING) + OUTPUT not in names), None)


class StackSource(Protocol):
    """A checkpoint, as far as stacks are read."""

    def shape(self, name: str) -> Sequence[int]:
        """Return a tensor's shape without reading it."""

    def read(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        """Read a part of a tensor."""


class TensorSource(StackSource, Protocol):
    """A checkpoint whose tensors are read by name."""

    @property
    def names(self) -> set[str]:
        """Return every tensor's name."""

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type."""


def tied_problem(
    embedding: str, output: str, source: TensorSource, start: int = 0, end: int | None = None
) -> str | None:
    """Return how the output layer of a checkpoint differs from the embedding that stands for it, if so.

    :param source: The checkpoint.
    :param start: First one of the rows that are compared.
    """
    if not source.names.issuperset((embedding, output)):
        return None
    one, other = (source.read(name, (slice(start, end),)) for name in (embedding, output))
    if (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(
        *(each.contiguous().view(torch.uint8) for each in (one, other))
    ):
        return None
    return f"{output}: differs from {embedding}, and tie_word_embeddings says that they are one"


# -------------------------------------------------------------------------
# Transforms
# -------------------------------------------------------------------------


def to_canonical(rule: WeightRule, tensors: Sequence[Tensor], ways: int = 1, dim: int = 0) -> Tensor:
    """Return the canonical tensor of a rule, or one rank's shard of it from that rank's shares.

    :param tensors: The Hugging Face tensors, in the rule's order.
    :param ways: Number of shards.
    :param dim: Dimension of the rows; not 0 for outputs of the layers that have the tensors.
    """
    if rule.transform == "interleave":
        groups = rule.groups // ways
        parts = [
            part for number, each in enumerate(tensors) for part in _split(rule, number, each, ways, dim)
        ]
        rows = torch.cat([part.unflatten(dim, (groups, -1)) for part in parts], dim + 1)
        return rows.flatten(dim, dim + 1)
    if rule.transform == "deinterleave":
        return torch.cat(
            [part for pair in enumerate(tensors) for part in _gathered(rule, *pair, ways, dim)], dim
        )
    return torch.cat(list(tensors), dim) if rule.transform == "concat" else tensors[0]


def from_canonical(rule: WeightRule, tensor: Tensor) -> list[Tensor]:
    """Return the Hugging Face tensors of a rule; the inverse of :func:`to_canonical`.

    :param tensor: Whole, without padding.
    :returns: Contiguous; what needs no change is no copy.
    """
    if rule.transform == "interleave":
        sizes = [size for part in rule.sections for size in part]
        parts = tensor.unflatten(0, (rule.groups, -1)).split([size // rule.groups for size in sizes], dim=1)
        rows = iter(part.flatten(0, 1) for part in parts)
        joined = [[next(rows) for _ in part] for part in rule.sections]
        return [each[0].contiguous() if len(each) == 1 else torch.cat(each) for each in joined]
    if rule.transform == "deinterleave":
        parts = iter(tensor.split([size for sizes in rule.sections for size in sizes]))
        grouped = [[next(parts).unflatten(0, (rule.groups, -1)) for _ in sizes] for sizes in rule.sections]
        return [torch.cat(each, 1).flatten(0, 1) for each in grouped]
    if rule.transform == "concat":
        return [part.contiguous() for part in tensor.split([sum(part) for part in rule.sections])]
    return [tensor]


def hf_tensors(canonical: Iterable[tuple[TensorRule, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors of canonical ones, in their order.

    :param canonical: Whole, without padding; the experts of a stack one after another.
    """
    stacks: list[Tensor] = []
    for rule, tensor in canonical:
        parts = from_canonical(rule.declared, tensor)
        if not rule.is_stacked:
            yield from zip(rule.hf, parts, strict=True)
            continue
        if rule.declared.transposed:
            parts = [part.t() for part in parts]
        if rule.expert == 0:
            stacks = [part.new_empty(rule.declared.experts, *part.shape) for part in parts]
        for stack, part in zip(stacks, parts, strict=True):
            stack[rule.expert] = part
        if rule.expert == rule.declared.experts - 1:
            yield from zip(rule.hf, stacks, strict=True)


def _split(rule: WeightRule, number: int, tensor: Tensor, ways: int, dim: int) -> Sequence[Tensor]:
    return tensor.split([size // ways for size in part_sizes(rule, number, tensor.shape[dim] * ways)], dim)


def _gathered(rule: WeightRule, number: int, tensor: Tensor, ways: int, dim: int) -> Sequence[Tensor]:
    """Return the parts of a tensor whose groups each have a share of them."""
    sizes = [size // rule.groups for size in rule.sections[number]]
    groups = tensor.unflatten(dim, (rule.groups // ways, -1)).split(sizes, dim + 1)
    return [part.flatten(dim, dim + 1) for part in groups]


def canonical_shape(rule: TensorRule, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the shape of the canonical tensor, without padding.

    :param shapes: Shapes of the Hugging Face tensors.
    :raises ValueError: They do not fit the rule; the text says why.
    """
    inner = [tuple(shape) for shape in shapes]
    declared = rule.declared
    if rule.is_stacked:
        if any(shape[:1] != (declared.experts,) for shape in inner):
            raise ValueError(f"no stack of {declared.experts} experts: {_listed(inner)}")
        inner = [shape[1:] for shape in inner]
    _check_sections(declared, inner)
    if rule.rows is not None and inner[0][:1] != (rule.rows,):
        raise ValueError(f"shape {_listed(inner)} for a vocabulary of {rule.rows}")
    if declared.transform == "copy":
        return inner[0]
    if len({shape[1:] for shape in inner}) > 1:
        raise ValueError(f"shapes that do not combine: {_listed(inner)}")
    return (sum(shape[0] for shape in inner), *inner[0][1:])


def canonical_problem(rule: TensorRule, shape: Sequence[int]) -> str | None:
    """Return why a canonical tensor cannot be split into Hugging Face tensors, or ``None``.

    :param shape: Whole, perhaps with padding.
    """
    declared, dim = rule.declared, rule.declared.split_dim or 0
    total = sum(size for part in declared.sections for size in part)
    if len(shape) <= dim:
        return f"{rule.canonical}: shape {tuple(shape)}, which has no dimension {dim}"
    if rule.rows is not None and shape[0] < rule.rows:
        return f"{rule.canonical}: {shape[0]} rows for a vocabulary of {rule.rows}"
    if total and shape[dim] != total:
        return f"{rule.canonical}: shape {tuple(shape)}, where dimension {dim} must have {total}"
    return None


def _check_sections(rule: WeightRule, shapes: Sequence[tuple[int, ...]]) -> None:
    dim = rule.split_dim or 0
    for number, shape in enumerate(shapes):
        if len(shape) <= dim:
            raise ValueError(f"shape {_listed(shapes)}, which has no dimension {dim}")
        wanted = sum(part_sizes(rule, number, shape[dim]))
        if shape[dim] != wanted:
            raise ValueError(f"shape {_listed(shapes)}, where dimension {dim} must have {wanted}")


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return " + ".join(str(shape) for shape in shapes)


# -------------------------------------------------------------------------
# What does not fit
# -------------------------------------------------------------------------


def name_problems(rules: Sequence[TensorRule], names: Iterable[str], unused: Sequence[str]) -> Iterator[str]:
    """Yield missing tensors of a checkpoint, and tensors that no rule uses.

    :param names: Names of the checkpoint's tensors.
    :param unused: Beginnings of names that may be there.
    """
    wanted = {name for rule in rules for name in rule.hf}
    counted = {name for name in names if name in wanted or not name.startswith(tuple(unused))}
    return set_problems(wanted, counted)


def set_problems(wanted: set[str], names: set[str]) -> Iterator[str]:
    """Yield the tensors that a checkpoint lacks and those that the model does not know."""
    yield from (f"{name}: missing in the checkpoint" for name in sorted(wanted - names))
    yield from (f"{name}: in the checkpoint but unknown to the model" for name in sorted(names - wanted))


def left_out(rules: Iterable[TensorRule], names: Iterable[str], unused: Sequence[str]) -> dict[str, int]:
    """Return how many tensors of a checkpoint the model does not have, by the beginning of their names.

    :param names: Names of the checkpoint's tensors.
    :param unused: Beginnings of names.
    """
    extra = set(names).difference(*(rule.hf for rule in rules))
    prefixes = (next((each for each in unused if name.startswith(each)), None) for name in sorted(extra))
    return dict(Counter(each for each in prefixes if each is not None))


def division_problems(rules: Iterable[tuple[TensorRule, Sequence[int], int]]) -> Iterator[str]:
    """Yield which tensors a sharding does not divide.

    :param rules: With the shape of the canonical tensor and the number of shards.
    """
    for rule, shape, ways in rules:
        if reason := division_problem(rule.declared, shape, ways):
            yield f"{rule.canonical}: {reason}"


def mapping_error(problems: Sequence[str], hint: str | None = None) -> WeightMappingError:
    """Return the error that lists the problems."""
    shown = "\n    ".join(problems[:SHOWN])
    more = f"\n    ... and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return WeightMappingError(
        f"{len(problems)} weights do not fit the model:\n    {shown}{more}",
        hint=hint or "Check that config.json belongs to these safetensors files.",
    )
