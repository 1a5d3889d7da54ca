"""The ``.metadata`` of a dist-checkpoint: the index from parts of tensors to files, unpickled safely."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from anygauge_hooks.errors import CheckpointError

__all__ = ["read_index", "torn"]

_OPTIMIZER = ("optimizer.", "chained_")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part of a tensor was saved."""

    sizes: torch.Size
    file: str
    start: int
    """First byte in the file."""
    length: int
    """In bytes."""


Index = tuple[dict[str, TensorStorageMetadata], dict[MetadataIndex, Place]]
"""Tensors by key, and their parts."""


def read_index(directory: Path) -> Index:
    """Return the tensors of a checkpoint without those of an optimizer.

    :raises CheckpointError: The index is torn, or a file is missing or too short.
    """
    path = directory / ".metadata"
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        tensors, places = _checked(metadata)
    except FileNotFoundError:
        raise torn(path, "there is no such file") from None
    except Exception as error:  # foreign code: unpickling what is torn fails in every way
        raise torn(path, f"{type(error).__name__}: {error}") from error
    _check_files(directory, places.values())
    return tensors, places


def _checked(metadata: Any) -> Index:
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds {type(metadata).__name__}")
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, Place] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and not key.startswith(_OPTIMIZER):
            tensors[key] = _tensor(key, entry)
            for chunk in tensors[key].chunks:
                index = MetadataIndex(key, chunk.offsets)
                if index in places:
                    raise ValueError(f"two parts of {key} overlap, at {tuple(chunk.offsets)}")
                places[index] = _place(key, chunk.sizes, metadata.storage_data[index])
    return tensors, places


def _tensor(key: str, entry: Any) -> TensorStorageMetadata:
    """Return an entry of the index with values of the right types."""
    size, dtype = torch.Size(map(int, entry.size)), entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"the type of {key} is {dtype!r}")
    chunks = [
        ChunkStorageMetadata(torch.Size(map(int, each.offsets)), torch.Size(map(int, each.sizes)))
        for each in entry.chunks
    ]
    for chunk in chunks:
        if any(a < 0 or a + n > whole for a, n, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            raise ValueError(
                f"{key} of shape {tuple(size)} has {tuple(chunk.sizes)} at {tuple(chunk.offsets)}"
            )
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _place(key: str, sizes: torch.Size, info: Any) -> Place:
    place = Place(sizes, str(info.relative_path), int(info.offset), int(info.length))
    if place.start < 0 or place.length < 0 or Path(place.file).name != place.file:
        raise ValueError(f"{key} should be {place.length} bytes at byte {place.start} of {place.file}")
    return place


def _check_files(directory: Path, places: Iterable[Place]) -> None:
    ends: defaultdict[str, int] = defaultdict(int)
    for place in places:
        ends[place.file] = max(ends[place.file], place.start + place.length)
    for name, end in ends.items():
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < end:
            raise torn(path, "is missing" if size is None else f"has {size} bytes and should have {end}")


def torn(path: Path, reason: str) -> CheckpointError:
    """Return the error about an unusable file."""
    return CheckpointError(
        f"{path} of a Megatron checkpoint cannot be used: {reason}.",
        hint="The save was interrupted, or the copy is not complete: make it again.",
    )


_TRUSTED = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *(
        ("torch.distributed.checkpoint.planner", name)
        for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("builtins", "set"),
}
"""Classes that a ``.metadata`` consists of. A pickle could name any function, and loading it would call
that."""


_STAND_INS: dict[tuple[str, str], type] = {
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): Metadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): SavePlan,
}
"""Stand-ins for subclasses that some versions of Megatron save with an optimizer. Nothing beyond the base
class is needed from them."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _TRUSTED or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which belongs in no checkpoint of tensors")
