"""Weights under their Hugging Face names, which are those of the model: read in shards, gathered whole."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from anygauge.engines.agreement import check_facts_agree, on_every_rank
from anygauge.engines.hf_directory import TensorReader, open_tensors
from anygauge_hooks.errors import WeightMappingError

__all__ = ["LocalShard", "full_weights", "load_weights", "local_shards", "own_rows"]

SHOWN = 8
"""Tensors that an error names."""
ROOT = "model."
"""How names of the language model begin in the root."""


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A parameter or persistent buffer, and the part of it on this rank."""

    name: str
    """In a checkpoint."""
    tensor: Tensor
    """The parameter, a :class:`DTensor`, or the buffer."""

    @property
    def local(self) -> Tensor:
        """Return this rank's rows; they share the memory of the parameter."""
        detached = self.tensor.detach()
        return detached.to_local() if isinstance(detached, DTensor) else detached

    @property
    def rows(self) -> tuple[int, int]:
        """Return the first row of this rank and the one after the last."""
        count = self.tensor.shape[0] if self.tensor.dim() else 1
        return own_rows(count) if isinstance(self.tensor, DTensor) else (0, count)


def own_rows(count: int) -> tuple[int, int]:
    """Return which of ``count`` rows are this rank's, as FSDP divides them."""
    size = -(-count // dist.get_world_size())
    first = min(count, dist.get_rank() * size)
    return first, min(count, first + size)


def local_shards(root: nn.Module) -> list[LocalShard]:
    """Return the parameters and persistent buffers of a model, each once."""
    kept = root.state_dict(keep_vars=True).keys()
    named = [*root.named_parameters(), *((n, b) for n, b in root.named_buffers() if n in kept)]
    return [LocalShard(name.removeprefix(ROOT), tensor) for name, tensor in named]


def load_weights(root: nn.Module, directory: Path, role: str = "model") -> None:
    """Read this rank's part of each weight from a Hugging Face directory. A collective.

    A value head that the directory lacks is filled with zeros: a critic expects nothing before it has seen a
    reward.

    :param role: Whose directory it is, for messages.
    :raises WeightMappingError: Lists the tensors that are missing, unexpected or of a wrong shape; nothing
        was read.
    :raises RankMismatchError: Ranks have different files.
    """
    with on_every_rank(open_tensors(directory), directory) as source:
        check_facts_agree(lambda: _small_tensors(source))
        names = _check(root, source)
        with torch.no_grad():
            for shard in local_shards(root):
                _read(shard, names[shard.name], source)


def _small_tensors(source: TensorReader) -> Iterator[tuple[str, str]]:
    """Yield the digests of all vectors, which tell two models of one size apart."""
    for name in sorted(source.names):
        shape = source.shape(name)
        digest = ""
        if len(shape) == 1:
            digest = blake2b(source(name).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        yield name, f"{list(shape)} {digest}"


def _check(root: Any, source: TensorReader) -> Mapping[str, str | None]:
    """Return where each tensor of the model is in the checkpoint; ``None`` for one that is zeros."""
    prefix = f"{root.model.base_model_prefix}."
    names: dict[str, str | None] = {}
    problems = []
    for shard in local_shards(root):
        stored = next((n for n in _spellings(shard.name, prefix) if n in source.names), None)
        names[shard.name] = stored
        if stored is None and not shard.name.startswith("score."):
            problems.append(f"{shard.name} is missing")
        elif stored is not None and list(source.shape(stored)) != list(shard.tensor.shape):
            problems.append(f"{stored} is {list(source.shape(stored))} and not {list(shard.tensor.shape)}")
    problems += _unexpected(root, source, {name for name in names.values() if name})
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise WeightMappingError(
            f"These weights do not fit {type(root.model).__name__}: {'; '.join(problems[:SHOWN])}{more}.",
            hint="Compare the directory's config.json with the model that the weights are from.",
        )
    return names


def _spellings(name: str, prefix: str) -> Iterator[str]:
    """Yield the names that a tensor may have in a checkpoint."""
    yield name
    if name.startswith(prefix):
        yield name.removeprefix(prefix)


def _unexpected(root: Any, source: TensorReader, taken: set[str]) -> Iterator[str]:
    model = root.model
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    ignored = {name for name in source.names if any(re.search(pattern, name) for pattern in patterns)}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in model.named_buffers()}
    output = "lm_head." if hasattr(root, "score") else None
    for name in sorted(source.names - taken - ignored - tied - buffers):
        if output is None or not name.startswith(output):
            yield f"{name} is not known"


def _read(shard: LocalShard, stored: str | None, source: TensorReader) -> None:
    first, last = shard.rows
    if stored is None:
        shard.local.zero_()
    elif not shard.tensor.dim():
        shard.local.copy_(source(stored))
    elif last > first:
        shard.local.copy_(source.read(stored, (slice(first, last),)))


def full_weights(root: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors under their Hugging Face names. A collective: every rank iterates to the end.

    :param dtype: Dtype of the parameters; buffers keep theirs.
    """
    for shard in local_shards(root):
        tensor = shard.tensor.detach()
        yield shard.name, _whole(tensor.to(dtype)) if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor()
    return full
