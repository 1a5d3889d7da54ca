"""The files of a checkpoint, one pair per rank: tensors as safetensors, and what describes them as JSON.

A tensor is a flat piece of a parameter, or of an optimizer's state for it. The JSON file says which part of
which parameter a piece is, so that ranks with other parts can read it; it is written last and holds the size
and the SHA-256 of the other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from anygauge_hooks.errors import CheckpointError

__all__ = ["FORMAT", "Piece", "PieceReader", "RankFile", "check_dtype", "key", "open_pieces", "write_rank"]

FORMAT = 1
"""Of the files of a rank; a reader refuses another."""
ALIGNMENT = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What a file of tensors may hold, and how it calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements ``start`` to ``end`` of a parameter, flattened, and of what is kept for each of them."""

    name: str
    """Canonical."""
    start: int
    end: int
    shape: Sequence[int]
    """Of the whole parameter."""
    kinds: Sequence[str]
    """Tensors of the piece: ``weight``, ``main`` where the optimizer has a copy of its own, and the
    optimizer's state."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """The optimizer's state that is one number for the whole piece: ``step``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """The JSON file of a rank."""

    format: int
    rank: int
    world_size: int
    device: str
    """Type of the device."""
    pieces: Sequence[Piece]
    schedule: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    """Settings of the optimizer's parameter groups."""
    rng: Mapping[str, Any]
    """State of every random generator."""
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """Name, bytes and SHA-256 of the file with the tensors."""


def key(kind: str, name: str) -> str:
    """Return the name of a piece's tensor in the file."""
    return f"{kind}/{name}"


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raise unless a file can hold a tensor.

    :raises CheckpointError: It cannot.
    """
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(
            f"{name} is {tensor.dtype}, which a checkpoint cannot hold.",
            hint="Keep it in another type or as a buffer that is not persistent, or set save.every to none.",
        )


def write_rank(directory: Path, description: RankFile, tensors: Mapping[str, Tensor]) -> None:
    """Write the files of a rank, and see them to the disk.

    :param tensors: Contiguous host tensors by :func:`key`.
    """
    stem = directory / f"rank-{description.rank:05d}"
    data = stem.with_suffix(".safetensors")
    size, digest = _write_tensors(data, tensors)
    written = asdict(description) | {"tensors": {"file": data.name, "bytes": size, "sha256": digest}}
    with stem.with_suffix(".json").open("wb") as stream:
        stream.write(json.dumps(written).encode())
        _to_disk(stream)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write a safetensors file and return its size in bytes and its SHA-256.

    The library's own writer copies all tensors once more and holds the interpreter's lock meanwhile, which
    would stop the training that goes on beside it.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as stream:
        parts: list[bytes | memoryview] = [_header(tensors), *map(_bytes, tensors.values())]
        for part in parts:
            digest.update(part)
            size += stream.write(part)
        _to_disk(stream)
    return size, digest.hexdigest()


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


def _to_disk(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())


class PieceReader:
    """Reads parts of parameters from the files of all ranks, whatever ranks wrote them."""

    def __init__(self, files: Sequence[RankFile], handles: Sequence[Any]) -> None:
        self.files = files
        self._pieces: defaultdict[str, list[tuple[Piece, Any]]] = defaultdict(list)
        for file, handle in zip(files, handles, strict=True):
            for piece in file.pieces:
                self._pieces[piece.name].append((piece, handle))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter."""
        return {name: tuple(pieces[0][0].shape) for name, pieces in self._pieces.items()}

    def dtype(self, kind: str, name: str, start: int, end: int) -> torch.dtype | None:
        """Return the type of the elements of one kind, of which all are there; reads headers alone.

        :returns: ``None`` if nothing of the kind was kept for the parameter.
        :raises CheckpointError: Some of the elements are in no file, or of another type than others.
        """
        found = {
            _stored_dtype(part, kind, piece) for piece, part, _ in self._covering(kind, name, start, end)
        }
        if len(found) > 1:
            raise CheckpointError(
                f"The checkpoint has {kind} of {name} in several types: {sorted(map(str, found))}.",
                hint="Resume from an earlier checkpoint.",
            )
        return found.pop() if found else None

    def read(self, kind: str, name: str, start: int, end: int) -> Tensor | None:
        """Return elements of one kind, ``[end - start]`` on the host.

        :returns: ``None`` if nothing of the kind was kept for the parameter.
        :raises CheckpointError: Some of the elements are in no file.
        """
        found = [part[elements] for _, part, elements in self._covering(kind, name, start, end)]
        if not found:
            return None
        return torch.cat(found) if len(found) > 1 else found[0]

    def _covering(self, kind: str, name: str, start: int, end: int) -> list[tuple[Piece, Any, slice]]:
        """Return pieces that are elements of one kind one after another, with the part to take of each."""
        found, position = [], start
        for piece, handle in (parts := self._parts(kind, name, start, end)):
            first, last = max(position, piece.start), min(end, piece.end)
            if first > position:
                break
            if last > first:
                part = _slice(handle, key(kind, name))
                found.append((piece, part, slice(first - piece.start, last - piece.start)))
                position = last
        if parts and position < end:
            raise CheckpointError(
                f"The checkpoint lacks elements {position} to {end} of {kind} of {name}.",
                hint="Files of a rank are missing; resume from an earlier checkpoint.",
            )
        return found

    def scalars(self, name: str, start: int, end: int) -> Mapping[str, float]:
        """Return the numbers that belong to a part of a parameter.

        :raises CheckpointError: The pieces that it is made of have different ones.
        """
        found = [piece.scalars for piece, _ in self._overlapping(name, start, end)]
        if any(scalars != found[0] for scalars in found):
            raise CheckpointError(
                f"The optimizer took different steps on the parts of {name}: {found}.",
                hint="Resume from an earlier checkpoint.",
            )
        return found[0] if found else {}

    def kinds(self, name: str, start: int, end: int) -> set[str]:
        """Return what is kept for a part of a parameter."""
        return {kind for piece, _ in self._overlapping(name, start, end) for kind in piece.kinds}

    def _parts(self, kind: str, name: str, start: int, end: int) -> list[tuple[Piece, Any]]:
        return [part for part in self._overlapping(name, start, end) if kind in part[0].kinds]

    def _overlapping(self, name: str, start: int, end: int) -> list[tuple[Piece, Any]]:
        pieces = [each for each in self._pieces[name] if each[0].start < end and start < each[0].end]
        return sorted(pieces, key=lambda each: each[0].start)


def _stored_dtype(part: Any, kind: str, piece: Piece) -> torch.dtype:
    """Return the type of a piece's tensor, which must be as long as the piece."""
    shape, known = part.get_shape(), {name: dtype for dtype, name in _DTYPES.items()}
    if shape != [piece.end - piece.start] or part.get_dtype() not in known:
        raise CheckpointError(
            f"{kind} of {piece.name} is stored as {part.get_dtype()} of shape {shape}, for elements "
            f"{piece.start} to {piece.end}.",
            hint="Resume from an earlier checkpoint.",
        )
    return known[part.get_dtype()]


def _slice(handle: Any, name: str) -> Any:
    try:
        return handle.get_slice(name)
    except SafetensorError as error:
        raise CheckpointError(
            f"The checkpoint has no {name}, which its description names: {error}.",
            hint="Resume from an earlier checkpoint.",
        ) from error


@contextmanager
def open_pieces(directory: Path) -> Iterator[PieceReader]:
    """Open the files of all ranks; tensors are read when asked for.

    :raises CheckpointError: One is missing, torn, or of another format or checkpoint.
    """
    files = _rank_files(directory)
    with ExitStack() as stack:
        handles = []
        for file in files:
            path = directory / file.tensors["file"]
            try:
                size = path.stat().st_size
                if size != file.tensors["bytes"]:
                    raise _torn(path, f"{size} bytes instead of {file.tensors['bytes']}")
                handles.append(stack.enter_context(safe_open(path, framework="pt")))
            except (OSError, SafetensorError) as error:
                raise _torn(path, str(error)) from error
        yield PieceReader(files, handles)


def _rank_files(directory: Path) -> list[RankFile]:
    first = _rank_file(directory / "rank-00000.json")
    others = [_rank_file(directory / f"rank-{rank:05d}.json") for rank in range(1, first.world_size)]
    return [first, *others]


def _rank_file(path: Path) -> RankFile:
    try:
        found = json.loads(path.read_bytes())
        number = found["format"]
        if number == FORMAT:
            return RankFile(**found | {"pieces": [Piece(**piece) for piece in found["pieces"]]})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _torn(path, f"{type(error).__name__}: {error}") from error
    raise CheckpointError(
        f"{path} has format {number}; this version reads format {FORMAT}.",
        hint="Resume with the version of anygauge that wrote it.",
    )


def _torn(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} of a checkpoint cannot be read: {reason}.", hint="Resume from an earlier checkpoint."
    )
