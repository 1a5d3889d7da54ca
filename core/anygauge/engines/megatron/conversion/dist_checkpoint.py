"""Megatron's dist-checkpoints of model weights, written and read without Megatron and without a model.

The format is that of ``torch.distributed.checkpoint``: tensors saved one after another in ``*.distcp`` files,
and ``.metadata`` that says which file has which part of which tensor. It has no sharding: any layout reads
what it needs. Written keys are those of layers that may differ (``decoder.layers.7. ...``); keys of layers
that are stacked along a first axis (``decoder.layers. ...``) are read too. Experts are stacked always.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from itertools import combinations
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from anygauge.engines.megatron.conversion.dist_index import read_index, torn
from anygauge.engines.megatron.weights.mapping import TensorRule

__all__ = ["DistReader", "plan_files", "stored_key", "write_file", "write_index"]

Parts = Callable[[TensorRule], Sequence[Tensor]]
"""Returns the pieces that make up a tensor, one under another."""

_EXPERT = re.compile(r"(.*\.experts\.)(linear_fc[12]\.(?:weight|bias))\d+")
_LAYER = re.compile(r"(.*\blayers\.)(\d+)\.(.+)")
_CONTENT = {"non_homogeneous_layers": True, "singleton_local_shards": False}
"""How keys are built, for whoever loads the checkpoint into a model of Megatron's."""
_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def stored_key(rule: TensorRule) -> str:
    """Return the key of a tensor that is written; all experts have one."""
    return _key(rule)[0]


def _key(rule: TensorRule) -> tuple[str, tuple[int, ...]]:
    """Return a tensor's key and its place along the axes that its key has in front of it."""
    if rule.expert is None:
        return rule.canonical, ()
    match = _EXPERT.fullmatch(rule.canonical)
    return (f"{match[1]}experts.{match[2]}", (rule.expert,)) if match else (rule.canonical, ())


# -------------------------------------------------------------------------
# Writing
# -------------------------------------------------------------------------


def plan_files(shares: Sequence[Sequence[tuple[TensorRule, Tensor]]]) -> list[SavePlan]:
    """Divide the tensors of a checkpoint among its files.

    :param shares: For each file its tensors, of which only type and shape matter.
    """
    plans = [SavePlan([_write_item(rule, form) for rule, form in share]) for share in shares]
    return _writer(Path()).prepare_global_plan(plans)


def _write_item(rule: TensorRule, form: Tensor) -> WriteItem:
    key, front = _key(rule)
    chunk = _chunk(front, form.shape)
    whole = torch.Size([*[rule.declared.experts] * len(front), *form.shape])
    data = TensorWriteData(chunk, TensorProperties(dtype=form.dtype), whole)
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _chunk(front: Sequence[int], shape: Sequence[int]) -> ChunkStorageMetadata:
    """Return where a tensor lies in a stored one.

    :param front: Its indices along the first axes of that.
    """
    offsets, sizes = (*front, *[0] * len(shape)), (*[1] * len(front), *shape)
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _writer(directory: Path) -> FileSystemWriter:
    # Whoever gives the directory its name flushes it to the disk, and no tensor is on a device.
    return FileSystemWriter(directory, sync_files=False, per_thread_copy_ahead=0)


def write_file(
    directory: Path, plan: SavePlan, rules: Sequence[TensorRule], parts: Parts
) -> list[WriteResult]:
    """Write the file of a plan.

    :param rules: Those that the plan was made for.
    """
    return _writer(directory).write_data(plan, _Planner(plan, rules, parts)).wait()


class _Planner(DefaultSavePlanner):
    """Makes each tensor when it is written."""

    def __init__(self, plan: SavePlan, rules: Sequence[TensorRule], parts: Parts) -> None:
        super().__init__()
        self._rules = {item.index: rule for item, rule in zip(plan.items, rules, strict=True)}
        self._parts = parts

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the tensor of an item."""
        assert write_item.tensor_data is not None
        tensor = torch.cat(list(self._parts(self._rules[write_item.index])))
        return tensor.view(write_item.tensor_data.chunk.sizes)


def write_index(directory: Path, plans: list[SavePlan], results: list[list[WriteResult]]) -> None:
    """Write the index of the ``*.distcp`` files."""
    _, metadata = create_default_global_save_plan(plans, rewrite_index_hints=False)
    _writer(directory).finish(metadata, results)
    torch.save({"content_metadata": _CONTENT}, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(_CONFIG))


# -------------------------------------------------------------------------
# Reading
# -------------------------------------------------------------------------


class DistReader:
    """Reads canonical tensors from a checkpoint of any sharding.

    :param directory: With ``.metadata`` and ``*.distcp``.
    :raises CheckpointError: The checkpoint is torn.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors, self._places = read_index(directory)

    @property
    def names(self) -> set[str]:
        """Return the keys of the checkpoint, which begin as canonical names do."""
        return set(self._tensors)

    def problems(self, rules: Sequence[TensorRule]) -> Iterator[str]:
        """Yield tensors that the checkpoint lacks, and tensors that no rule uses."""
        used: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
        for rule in rules:
            if (region := self._find(rule)) is None:
                yield f"{rule.canonical}: missing in the checkpoint"
            else:
                used[region[0]].add(region[1])
        for key in sorted(set(self._tensors) - set(used)):
            yield f"{key}: in the checkpoint but unknown to the model"
        for key, fronts in used.items():
            axes = len(next(iter(fronts)))
            held = prod(self._tensors[key].size[:axes])
            if held != len(fronts):
                yield f"{key}: the checkpoint holds {held}, and the model has {len(fronts)} of them"

    def shape(self, rule: TensorRule) -> tuple[int, ...]:
        """Return the shape of a canonical tensor, with padding; it must be there."""
        key, front = self._region(rule)
        return self._tensors[key].size[len(front) :]

    def dtype(self, rule: TensorRule) -> torch.dtype:
        """Return the type of a tensor; it must be there."""
        return self._tensors[self._region(rule)[0]].properties.dtype

    def read(self, rule: TensorRule) -> Tensor:
        """Read a canonical tensor, without the padding of a vocabulary."""
        return self._rows(rule, 0, rule.rows)

    def parts(self, rule: TensorRule) -> Sequence[Tensor]:
        """Read a canonical tensor, without the padding of a vocabulary."""
        return [self.read(rule)]

    def padding(self, rule: TensorRule) -> Tensor:
        """Read the rows of a vocabulary that are no token's."""
        return self._rows(rule, rule.rows or 0, None)

    def _rows(self, rule: TensorRule, start: int, stop: int | None) -> Tensor:
        (key, front), shape = self._region(rule), self.shape(rule)
        return self._assemble(key, _chunk(front, shape)).reshape(shape)[start:stop]

    def _assemble(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        """Put a part of a stored tensor together from all that were saved and overlap it."""
        stored = self._tensors[key]
        tensor = torch.empty(chunk.sizes, dtype=stored.properties.dtype)
        items = create_read_items_for_chunk_list(key, stored, [chunk])
        if any(_overlap(one, other) for one, other in combinations(items, 2)):
            raise torn(self._directory, f"parts of {key} overlap")
        if missing := tensor.numel() - sum(prod(item.lengths) for item in items):
            raise torn(self._directory, f"{key} lacks {missing} elements")
        if len(items) == 1:
            return self._load(items[0], tensor.dtype)
        for item in items:
            tensor[_slices(item.dest_offsets, item.lengths)] = self._load(item, tensor.dtype)
        return tensor

    def _region(self, rule: TensorRule) -> tuple[str, tuple[int, ...]]:
        region = self._find(rule)
        assert region is not None, rule.canonical
        return region

    def _find(self, rule: TensorRule) -> tuple[str, tuple[int, ...]] | None:
        """Return the key of the tensor that has a canonical one, and its place along the first axes."""
        key, front = _key(rule)
        layer = _LAYER.fullmatch(key)
        stacked = (f"{layer[1]}{layer[3]}", (int(layer[2]), *front)) if layer else (key, front)
        for name, place in ((key, front), stacked):
            if (entry := self._tensors.get(name)) is None or len(place) > len(entry.size):
                continue
            if all(index < size for index, size in zip(place, entry.size, strict=False)):
                return name, place
        return None

    def _load(self, item: ReadItem, dtype: torch.dtype) -> Tensor:
        """Read what an item needs of what was saved as one tensor.

        torch's own reader of checkpoints would convert another type than the index names.
        """
        place = self._places[item.storage_index]
        path = self._directory / place.file
        with path.open("rb") as file:
            file.seek(place.start)
            data = BytesIO(file.read(place.length))
        try:
            value = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:  # foreign code: torch reads what is torn
            raise torn(path, f"{type(error).__name__}: {error}") from error
        if not isinstance(value, Tensor):
            raise torn(path, f"it holds {type(value).__name__}, where a tensor belongs")
        actual, wanted = tuple(value.shape), tuple(place.sizes)
        if value.dtype != dtype or [n for n in actual if n != 1] != [n for n in wanted if n != 1]:
            what = f"{value.dtype} of shape {actual}"
            raise torn(path, f"it holds {what}, where .metadata says {dtype} of {wanted}")
        return value.detach().reshape(wanted)[_slices(item.storage_offsets, item.lengths)]


def _overlap(one: ReadItem, other: ReadItem) -> bool:
    return all(
        max(a, b) < min(a + n, b + m)
        for a, n, b, m in zip(one.dest_offsets, one.lengths, other.dest_offsets, other.lengths, strict=True)
    )


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
