"""Megatron's dist-checkpoints of model weights, written and read without Megatron and without a model.

The format is that of ``torch.distributed.checkpoint``: tensors saved one after another in ``*.distcp`` files,
and ``.metadata`` that says which file has which part of which tensor. It has no sharding: any layout reads
what it needs. Written keys are those of layers that may differ (``decoder.layers.7. ...``); keys of layers
that are stacked along a first axis (``decoder.layers. ...``) are read too. Experts are stacked always.
"""

from __future__ import annotations

import json
import math
import mmap
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from anygauge.engines.megatron.conversion.dist_index import Chunk, read_index, torn
from anygauge.engines.megatron.conversion.dist_payload import load_payload
from anygauge.engines.megatron.weights.mapping import TensorRule

__all__ = ["DistReader", "WrittenFile", "stored_key", "write_index", "write_tensors"]

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


@dataclass(slots=True)
class WrittenFile:
    """Tensors that one file holds."""

    tensors: dict[str, TensorStorageMetadata] = field(default_factory=dict)
    storage: dict[MetadataIndex, Any] = field(default_factory=dict)


def write_tensors(path: Path, tensors: Iterable[tuple[TensorRule, Sequence[Tensor]]]) -> WrittenFile:
    """Write tensors, one after another, and return where they are.

    :param tensors: Each as pieces that make it up one under another.
    """
    part = WrittenFile()
    with _File(FileIO(path, "wb")) as file:
        for rule, pieces in tensors:
            start = file.tell()
            shape = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
            key, front = _key(rule)
            offsets, sizes = torch.Size([*front, *[0] * len(shape)]), torch.Size([*[1] * len(front), *shape])
            _save(file, torch.empty(sizes, dtype=pieces[0].dtype), pieces)
            chunk = ChunkStorageMetadata(offsets, sizes)
            size = torch.Size([*[rule.declared.experts] * len(front), *shape])
            properties = TensorProperties(dtype=pieces[0].dtype)
            known = part.tensors.setdefault(key, TensorStorageMetadata(properties, size, []))
            known.chunks.append(chunk)
            part.storage[MetadataIndex(key, offsets)] = _StorageInfo(path.name, start, file.tell() - start)
    return part


def _save(file: _File, form: Tensor, pieces: Sequence[Tensor]) -> None:
    """Write what ``torch.save`` writes, with the elements of the pieces, which are copied nowhere.

    :param form: Of the type and shape; its elements do not matter.
    """
    with torch.serialization.skip_data():
        torch.save(form, file)
    end = file.tell()
    file.seek(file.gap)
    for piece in pieces:
        file.write(piece.contiguous().view(-1).view(torch.uint8).numpy().data)
    file.seek(end)


class _File(BufferedWriter):
    """A file that remembers where elements were left out."""

    gap = 0

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self.gap = self.tell()
        return super().seek(offset, whence)


def write_index(directory: Path, parts: Sequence[WrittenFile]) -> None:
    """Write what makes ``*.distcp`` files a checkpoint."""
    tensors: dict[str, TensorStorageMetadata] = {}
    for part in parts:
        for key, entry in part.tensors.items():
            if key in tensors:
                tensors[key].chunks.extend(entry.chunks)
            else:
                tensors[key] = entry
    storage = {index: info for part in parts for index, info in part.storage.items()}
    metadata = Metadata(state_dict_metadata=dict(tensors), storage_data=storage)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    torch.save({"content_metadata": _CONTENT}, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(_CONFIG))


# -------------------------------------------------------------------------
# Reading
# -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Region:
    """Region of a canonical tensor in a stored one."""

    key: str
    front: tuple[int, ...]
    """Indices along the first axes."""
    shape: tuple[int, ...]
    dtype: torch.dtype


_POPULATE_READ = 22
"""``MADV_POPULATE_READ`` of Linux 5.14: map a range at once."""
_Box = Sequence[tuple[int, int]]
"""First index and the one after the last, along each axis."""


class DistReader:
    """Reads canonical tensors from a checkpoint of any sharding.

    :param directory: With ``.metadata`` and ``*.distcp``.
    :raises CheckpointError: The checkpoint is torn.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors = read_index(directory)
        self._files: dict[str, mmap.mmap] = {}

    @property
    def names(self) -> set[str]:
        """Return the keys of the checkpoint, which begin as canonical names do."""
        return set(self._tensors)

    def problems(self, rules: Sequence[TensorRule]) -> Iterator[str]:
        """Yield the tensors that the checkpoint lacks and those that no rule needs."""
        used: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
        for rule in rules:
            region = self._find(rule)
            if region is None:
                yield f"{rule.canonical}: missing in the checkpoint"
            else:
                used[region.key].add(region.front)
        for key in sorted(set(self._tensors) - set(used)):
            yield f"{key}: in the checkpoint but unknown to the model"
        for key, fronts in used.items():
            axes = len(next(iter(fronts)))
            held = math.prod(self._tensors[key].size[:axes])
            if held != len(fronts):
                yield f"{key}: the checkpoint holds {held}, and the model has {len(fronts)} of them"

    def shape(self, rule: TensorRule) -> tuple[int, ...]:
        """Return the shape of a canonical tensor, with padding; it must be there."""
        return self._region(rule).shape

    def dtype(self, rule: TensorRule) -> torch.dtype:
        """Return the type of a tensor; it must be there."""
        return self._region(rule).dtype

    def read(self, rule: TensorRule) -> Tensor:
        """Read a canonical tensor, without the padding of a vocabulary.

        :returns: Read-only in effect: it may be the file itself.
        """
        return self._rows(rule, 0, rule.rows)

    def parts(self, rule: TensorRule) -> Sequence[Tensor]:
        """Read a canonical tensor, without the padding of a vocabulary."""
        return [self.read(rule)]

    def padding(self, rule: TensorRule) -> Tensor:
        """Read the rows of a vocabulary that are no token's."""
        return self._rows(rule, rule.rows or 0, None)

    def _rows(self, rule: TensorRule, start: int, stop: int | None) -> Tensor:
        region = self._region(rule)
        offsets = (*region.front, *[0] * len(region.shape))
        sizes = (*[1] * len(region.front), *region.shape)
        stored = self._tensors[region.key]
        chunk = stored.chunks.get(offsets)
        if chunk is not None and chunk.sizes == sizes:
            tensor = self._load(chunk, region.dtype)
        else:
            tensor = self._assemble(region.key, offsets, sizes)
        tensor = tensor.reshape(region.shape)
        return tensor if (start, stop) == (0, None) else tensor[start:stop]

    def _assemble(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Put a region together from all chunks that overlap it."""
        stored = self._tensors[key]
        tensor = torch.empty(sizes, dtype=stored.dtype)
        filled: list[_Box] = []
        for chunk in stored.chunks.values():
            starts = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            ends = [
                min(a + n, b + m)
                for a, n, b, m in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            ]
            box = list(zip(starts, ends, strict=True))
            if any(start >= end for start, end in box):
                continue
            if any(_meet(box, other) for other in filled):
                raise torn(self._directory, f"parts of {key} lie upon each other")
            filled.append(box)
            part = self._load(chunk, stored.dtype)
            tensor[_within(box, offsets)] = part[_within(box, chunk.offsets)]
        missing = tensor.numel() - sum(math.prod(end - start for start, end in box) for box in filled)
        if missing:
            raise torn(self._directory, f"{key} lacks {missing} elements")
        return tensor

    def _region(self, rule: TensorRule) -> _Region:
        region = self._find(rule)
        assert region is not None, rule.canonical
        return region

    def _find(self, rule: TensorRule) -> _Region | None:
        key, front = _key(rule)
        layer = _LAYER.fullmatch(key)
        stacked = (f"{layer[1]}{layer[3]}", (int(layer[2]), *front)) if layer else (key, front)
        for name, place in ((key, front), stacked):
            entry = self._tensors.get(name)
            if (
                entry is not None
                and len(place) <= len(entry.size)
                and all(index < size for index, size in zip(place, entry.size, strict=False))
            ):
                return _Region(name, place, entry.size[len(place) :], entry.dtype)
        return None

    def _view(self, chunk: Chunk) -> memoryview:
        if chunk.file not in self._files:
            with (self._directory / chunk.file).open("rb") as file:
                # Private, so that torch may take it for memory that can be written.
                self._files[chunk.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        held, first = self._files[chunk.file], chunk.start - chunk.start % mmap.PAGESIZE
        with suppress(OSError):  # without it the pages are found one by one, which takes half as long again
            held.madvise(_POPULATE_READ, first, chunk.start + chunk.length - first)
        return memoryview(held)[chunk.start : chunk.start + chunk.length]

    def _load(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        try:
            return load_payload(self._view(chunk), dtype, chunk.sizes)
        except ValueError as error:
            raise torn(self._directory / chunk.file, str(error)) from error


def _meet(one: _Box, other: _Box) -> bool:
    return all(max(a, b) < min(e, f) for (a, e), (b, f) in zip(one, other, strict=True))


def _within(box: _Box, offsets: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start - at, end - at) for (start, end), at in zip(box, offsets, strict=True))
