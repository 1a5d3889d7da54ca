"""Weights under their Hugging Face names, which are those of the model: read in shards, gathered whole."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from anygauge.engines.agreement import check_facts_agree, on_every_rank
from anygauge.engines.carried_weights import warn_of_left_out
from anygauge.engines.dequantize import open_unquantized
from anygauge.engines.hf_directory import TensorReader
from anygauge.wording import listed
from anygauge_hooks.errors import WeightMappingError

__all__ = [
    "LocalShard",
    "StoredNames",
    "base_shards",
    "full_weights",
    "load_weights",
    "local",
    "local_shards",
    "stored_names",
    "warn_of_unused",
    "whole",
]


SHOWN = 8
"""Tensors that an error names."""
ROOT = "model."
"""How names of the language model begin in the root."""
SCORE = "score."
"""How those of a critic's value head begin."""


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A parameter or persistent buffer, and the part of it on this rank."""

    name: str
    """In a checkpoint."""
    tensor: Tensor
    """The parameter, a :class:`DTensor` if several ranks share it, or the buffer."""

    @property
    def value(self) -> Tensor:
        """Return what the model computes with, sharded as it is."""
        return self.tensor.detach()

    @property
    def local(self) -> Tensor:
        """Return this rank's rows; they share the memory of the parameter."""
        return local(self.tensor.detach())

    @property
    def stored(self) -> Sequence[Tensor]:
        """Return the tensors that this rank's rows are stored in."""
        return [self.local]

    @contextmanager
    def writing(self) -> Iterator[Tensor]:
        """Yield this rank's rows, to be written in the block."""
        yield self.local

    @property
    def rows(self) -> tuple[int, int]:
        """Return the first row of this rank and the one after the last."""
        count = self.tensor.shape[0] if self.tensor.dim() else 1
        if not isinstance(self.tensor, DTensor):
            return 0, count
        mesh = self.tensor.device_mesh
        size = -(-count // mesh.size(mesh.ndim - 1))
        first = min(count, mesh.get_local_rank(mesh.ndim - 1) * size)
        return first, min(count, first + size)

    @property
    def is_first_copy(self) -> bool:
        """Return whether no rank before this one has the same rows: sums over ranks count them once."""
        if not isinstance(self.tensor, DTensor):
            return dist.get_rank() == 0
        mesh = self.tensor.device_mesh
        return mesh.ndim == 1 or mesh.get_local_rank(0) == 0


def local_shards(root: Any) -> list[LocalShard]:
    """Return the parameters and persistent buffers of a model, each once."""
    kept = root.state_dict(keep_vars=True).keys()
    buffers = ((name, buffer) for name, buffer in root.named_buffers() if name in kept)
    named = [*((name, root.trained(parameter)) for name, parameter in root.named_parameters()), *buffers]
    return [*(LocalShard(name.removeprefix(ROOT), tensor) for name, tensor in named), *root.quantized]


def base_shards(root: Any) -> list[LocalShard]:
    """Return those that a checkpoint of the model has: all but adapters."""
    return [shard for shard in local_shards(root) if not root.adapters.owns(shard.name)]


@dataclass(frozen=True, slots=True)
class StoredNames:
    """Where a tensor of the model is in a checkpoint."""

    experts: Sequence[Sequence[str]]
    """Names by expert, for experts that are one tensor in the model and one each in the checkpoint: those
    whose rows are concatenated. Of any other tensor, one name by itself."""
    is_stack: bool = False
    is_turned: bool = False
    """Whether the matrices of a stack lie the other way in the checkpoint."""


def load_weights(root: Any, directory: Path) -> Mapping[str, StoredNames]:
    """Read this rank's part of each weight from a Hugging Face directory. A collective.

    A value head that the directory lacks is filled with zeros: a critic expects nothing before it has seen a
    reward.

    :returns: Where the tensors were, by the model's names.
    :raises WeightMappingError: Lists the tensors that are missing, unexpected or of a wrong shape; nothing
        was read.
    :raises RankMismatchError: Ranks have different files.
    """
    with on_every_rank(open_unquantized(directory), directory) as source:
        check_facts_agree(lambda: _small_tensors(source))
        names = _locate(root, source)
        with torch.no_grad():
            for shard in base_shards(root):
                with shard.writing() as rows:
                    _read(rows, shard, names.get(shard.name), source)
    return names


def stored_names(root: Any, directory: Path) -> Mapping[str, StoredNames]:
    """Return where a Hugging Face directory has the tensors of a model, by the model's names. A collective.

    :raises WeightMappingError: Lists the tensors that are missing, unexpected or of a wrong shape.
    """
    with on_every_rank(open_unquantized(directory), directory) as source:
        return _locate(root, source)


def warn_of_unused(directory: Path, prefixes: Sequence[str], carried: Sequence[str]) -> None:
    """Warn of the tensors of a checkpoint that a run leaves out.

    :param prefixes: How their names begin.
    :param carried: Those that exports have nevertheless.
    """
    if dist.get_rank() != 0:
        return
    with open_unquantized(directory) as source:
        counts = {prefix: sum(name.startswith(prefix) for name in source.names) for prefix in prefixes}
    warn_of_left_out(directory, {prefix: count for prefix, count in counts.items() if count}, carried)


def _small_tensors(source: TensorReader) -> Iterator[tuple[str, str]]:
    """Yield shapes, and the digests of all vectors, which tell two models of one size apart."""
    for name in sorted(source.names):
        shape = source.shape(name)
        digest = ""
        if len(shape) == 1:
            digest = blake2b(source(name).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        yield name, f"{list(shape)} {digest}"


def _locate(root: Any, source: TensorReader) -> Mapping[str, StoredNames]:
    """Return where each tensor of the model is in the checkpoint.

    :raises WeightMappingError: One is not there, or something else is.
    """
    model = root.model
    renamings, stacks, turned = _conversions(model)
    known: dict[str, str] = {}
    for stored in source.names:
        name = stored
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        known[name] = stored
    names: dict[str, StoredNames] = {}
    problems: list[str] = []
    for shard in base_shards(root):
        candidates = _candidates(shard, stacks, f"{model.base_model_prefix}.")
        stored_names = next(
            (
                StoredNames([[known[n] for n in each] for each in names], is_stack)
                for names, is_stack in candidates
                if all(n in known for each in names for n in each)
            ),
            None,
        )
        if stored_names is None:
            problems += [] if shard.name.startswith(SCORE) else [f"{shard.name} is missing"]
            continue
        if _is_turned(shard, stored_names, source, turned):
            stored_names = replace(stored_names, is_turned=True)
        names[shard.name] = stored_names
        problems += _misfits(shard, stored_names, source)
    taken = {name for each in names.values() for expert in each.experts for name in expert}
    problems += _unexpected(root, known, taken)
    if problems:
        raise WeightMappingError(
            f"These weights do not fit {type(model).__name__}: {listed(problems, SHOWN, '; ')}.",
            hint="Compare the directory's config.json with the model that the weights are from.",
        )
    return names


def _conversions(model: Any) -> tuple[list[Any], dict[str, Sequence[str]], list[str]]:
    """Return transformers' renamings of a checkpoint, the tensors that it stacks by experts, and turned ones.

    Stacks are by the end of the model's name the ends of the stored names, with ``*`` for the expert. Turned
    stacks, whose matrices may lie the other way, are ends of names.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    renamings, stacks, turned = [], {}, []
    for entry in get_model_conversion_mapping(model):
        operations = [type(each).__name__ for each in getattr(entry, "operations", ())]
        if operations in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
            stacks[entry.target_patterns[0]] = entry.source_patterns
        elif operations == ["Transpose"]:
            turned.append(entry.target_patterns[0])
        elif not operations:
            renamings.append(entry)
    return renamings, stacks, turned


def _is_turned(shard: LocalShard, stored: StoredNames, source: TensorReader, turned: Sequence[str]) -> bool:
    """Return whether the matrices of a stack lie the other way, which their shape says."""
    shape = list(shard.tensor.shape)
    if stored.is_stack or len(shape) != 3 or not shard.name.endswith(tuple(turned)):
        return False
    return list(source.shape(stored.experts[0][0])) == [shape[0], shape[2], shape[1]] != shape


def _candidates(
    shard: LocalShard, stacks: Mapping[str, Sequence[str]], prefix: str
) -> Iterator[tuple[list[list[str]], bool]]:
    """Yield the names that a tensor may have in a checkpoint, and whether they are of single experts."""
    yield [[shard.name]], False
    if shard.name.startswith(prefix):
        yield [[shard.name.removeprefix(prefix)]], False
    for target, sources in stacks.items():
        if shard.name.endswith(target):
            layer = shard.name.removesuffix(target)
            experts = range(shard.tensor.shape[0])
            yield [[f"{layer}{each.replace('*', str(e))}" for each in sources] for e in experts], True


def _misfits(shard: LocalShard, stored: StoredNames, source: TensorReader) -> Iterator[str]:
    wanted = list(shard.tensor.shape)[1:] if stored.is_stack else list(shard.tensor.shape)
    wanted = [wanted[0], *reversed(wanted[1:])] if stored.is_turned else wanted
    for expert in stored.experts:
        shapes = [list(source.shape(name)) for name in expert]
        joined = [sum(each[0] for each in shapes), *shapes[0][1:]] if stored.is_stack else shapes[0]
        if joined != wanted:
            yield f"{' + '.join(expert)} is {joined} and not {wanted}"


def _unexpected(root: Any, known: Mapping[str, str], taken: Collection[str]) -> Iterator[str]:
    """Yield the tensors of a checkpoint that the model neither has nor leaves out knowingly."""
    model = root.model
    own = {name for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]}
    prefix = f"{model.base_model_prefix}."
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    for name, stored in sorted(known.items()):
        is_output = root.is_critic and name.startswith(root.output_name)
        if stored in taken or {name, prefix + name} & own or is_output:
            continue
        if not any(re.search(pattern, stored) for pattern in (*patterns, *root.unused)):
            yield f"{stored} is not known"


def _read(local: Tensor, shard: LocalShard, stored: StoredNames | None, source: TensorReader) -> None:
    """Write the rows of a shard.

    :param local: Those of this rank.
    """
    first, last = shard.rows
    if stored is None:
        local.zero_()
    elif stored.is_stack:
        for expert, target in zip(stored.experts[first:last], local, strict=True):
            sizes = [source.shape(name)[0] for name in expert]
            for name, part in zip(expert, target.split(sizes), strict=True):
                part.copy_(source(name))
    elif not shard.tensor.dim():
        local.copy_(source(stored.experts[0][0]))
    elif last > first:
        rows = source.read(stored.experts[0][0], (slice(first, last),))
        local.copy_(rows.mT if stored.is_turned else rows)


def full_weights(
    root: Any, names: Mapping[str, StoredNames], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors under their Hugging Face names, adapters merged into them.

    A collective: every rank iterates to the end.

    :param names: Where a checkpoint has them, of :func:`load_weights`.
    :param dtype: Dtype of the parameters; buffers keep theirs.
    """
    for shard in base_shards(root):
        tensor = root.adapters.merged(shard, root.trained)
        full = whole(tensor.to(dtype)) if isinstance(shard.tensor, nn.Parameter) else tensor
        stored = names.get(shard.name, StoredNames([[shard.name]]))
        if not stored.is_stack:
            yield stored.experts[0][0], full.mT.contiguous() if stored.is_turned else full
            continue
        for expert, part in zip(stored.experts, full, strict=True):
            yield from zip(expert, part.chunk(len(expert)), strict=True)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that may be sharded. A collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
