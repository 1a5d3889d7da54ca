"""The ``.metadata`` of a dist-checkpoint: which file has which part of which tensor; read without trust."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from anygauge_hooks.errors import CheckpointError

__all__ = ["Chunk", "Stored", "read_index", "torn"]

_OPTIMIZER = ("optimizer.", "chained_")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor, saved by itself."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """First byte in the file."""
    length: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint."""

    size: tuple[int, ...]
    dtype: torch.dtype
    chunks: Mapping[tuple[int, ...], Chunk]
    """Chunks by their offsets."""


def read_index(directory: Path) -> dict[str, Stored]:
    """Return the tensors of a checkpoint by key, but for those of an optimizer.

    :raises CheckpointError: The index is torn, or a file is missing or too short.
    """
    path = directory / ".metadata"
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds {type(metadata).__name__}")
        tensors = {
            str(key): _stored(key, entry, metadata.storage_data)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith(_OPTIMIZER)
        }
    except FileNotFoundError:
        raise torn(path, "there is no such file") from None
    except Exception as error:  # foreign code: unpickling what is torn fails in every way
        raise torn(path, f"{type(error).__name__}: {error}") from error
    _check_files(directory, tensors)
    return tensors


def _stored(key: str, entry: Any, storage: Mapping[Any, Any]) -> Stored:
    size, dtype = tuple(map(int, entry.size)), entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"the type of {key} is {dtype!r}")
    chunks: dict[tuple[int, ...], Chunk] = {}
    for each in entry.chunks:
        offsets, sizes = tuple(map(int, each.offsets)), tuple(map(int, each.sizes))
        info = storage[MetadataIndex(key, each.offsets)]
        chunk = Chunk(offsets, sizes, str(info.relative_path), int(info.offset), int(info.length))
        if chunk.start < 0 or chunk.length < 0 or Path(chunk.file).name != chunk.file:
            raise ValueError(f"{key} is to be {chunk.length} bytes at byte {chunk.start} of {chunk.file}")
        if offsets in chunks:
            raise ValueError(f"two parts of {key} lie upon each other, at {offsets}")
        if any(a < 0 or a + n > whole for a, n, whole in zip(offsets, sizes, size, strict=True)):
            raise ValueError(f"{key} of shape {size} has {sizes} at {offsets}")
        chunks[offsets] = chunk
    return Stored(size, dtype, chunks)


def _check_files(directory: Path, tensors: Mapping[str, Stored]) -> None:
    ends: defaultdict[str, int] = defaultdict(int)
    for stored in tensors.values():
        for chunk in stored.chunks.values():
            ends[chunk.file] = max(ends[chunk.file], chunk.start + chunk.length)
    for name, end in ends.items():
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < end:
            raise torn(path, "is missing" if size is None else f"has {size} bytes and should have {end}")


def torn(path: Path, reason: str) -> CheckpointError:
    """Return the error that says what is wrong with a file."""
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
