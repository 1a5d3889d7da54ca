"""Checkpoint files, a pair for each rank: tensors as safetensors, and their descriptions as JSON.

A tensor is a flat piece of a rank's region of a parameter, or of an optimizer's state for it. The JSON file
says which part of which parameter a piece is, so that ranks with other regions can read it; it is written
last and holds the size and the SHA-256 of the other.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from anygauge.disk import read_json, stream_to_disk, write_file
from anygauge_hooks.errors import CheckpointError

__all__ = [
    "FORMAT",
    "WEIGHT",
    "Piece",
    "PieceReader",
    "RankFile",
    "Region",
    "check_dtype",
    "key",
    "open_pieces",
    "write_rank",
]

FORMAT = 2
"""Format version of a rank's files; a reader refuses another."""
WEIGHT = "weight"
"""The kind of what every piece has: the values of the model."""
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
"""Safetensors names of the dtypes that a file may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Part of a parameter that a rank holds: stretches along one dimension, concatenated."""

    shape: tuple[int, ...]
    """Shape of the whole parameter, without padding."""
    dim: int
    stretches: tuple[tuple[int, int], ...]
    """First index along the dimension and the one after the last."""
    size: int
    """Along the dimension; what comes after the stretches is padding."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return all of a parameter."""
        size = shape[0] if shape else 1
        return cls(shape=tuple(shape), dim=0, stretches=((0, size),), size=size)

    @property
    def rows(self) -> int:
        """Return how often the dimension comes."""
        return math.prod(self.shape[: self.dim])

    @property
    def inner(self) -> int:
        """Return the elements of each index along the dimension."""
        return math.prod(self.shape[self.dim + 1 :])

    @property
    def elements(self) -> int:
        """Return the number of elements, with padding."""
        return self.rows * self.size * self.inner


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements ``start`` to ``end`` of a flattened region, and of the optimizer state for each of them."""

    name: str
    """Canonical."""
    region: Region
    start: int
    end: int
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
    layout: Mapping[str, int]
    """How the model is divided."""
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
    base: Mapping[str, Any] = field(default_factory=dict)
    """Frozen base weights of adapters, which the pieces leave out: path and checksum, with rank and alpha of
    the adapters. Empty where the pieces are the whole model."""


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
    write_file(stem.with_suffix(".json"), json.dumps(written).encode())


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
        stream_to_disk(stream)
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


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Indices along the divided dimension that a stored region and a wanted one have in common."""

    region: Region
    """The stored one."""
    start: int
    end: int
    """Flat elements of the stored region that have to be read."""
    rows: int
    first: int
    """Index, within what is read of each row, of what is wanted."""
    target: int
    """Index within the wanted region."""
    count: int


class PieceReader:
    """Reads parts of parameters from the files of all ranks, whatever regions those had."""

    def __init__(self, files: Sequence[RankFile], handles: Sequence[Any]) -> None:
        self.files = files
        self._pieces: dict[str, dict[Region, list[tuple[Piece, Any]]]] = {}
        for file, handle in zip(files, handles, strict=True):
            for piece in file.pieces:
                self._pieces.setdefault(piece.name, {}).setdefault(piece.region, []).append((piece, handle))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter, whole."""
        return {name: next(iter(held)).shape for name, held in self._pieces.items()}

    def dtype(self, kind: str, name: str, region: Region, start: int, end: int) -> torch.dtype | None:
        """Return the dtype of all elements of one kind; reads only headers.

        :returns: ``None`` if nothing of the kind was kept for the parameter.
        :raises CheckpointError: Some of the elements are in no file, or of another type than others.
        """
        overlaps = self._overlaps(kind, name, region, start, end)
        dtypes = {
            _stored_dtype(part, kind, piece)
            for overlap in overlaps
            for piece, part, _ in self._covering(kind, name, overlap)
        }
        if len(dtypes) > 1:
            types = sorted(map(str, dtypes))
            raise _damaged(f"The checkpoint has {kind} of {name} in several types: {types}.")
        return dtypes.pop() if dtypes else None

    def read(self, kind: str, name: str, region: Region, start: int, end: int) -> Tensor | None:
        """Return elements of one kind of a region, ``[end - start]`` on the host; padding is 0.

        Nothing else is read, but for whole rows where the divided dimension is not the first.

        :returns: ``None`` if nothing of the kind was kept for the parameter.
        :raises CheckpointError: Some of the elements are in no file.
        """
        overlaps = self._overlaps(kind, name, region, start, end)
        if not overlaps:
            return None
        if overlaps[0].region == region:
            return self._flat(kind, name, overlaps[0])
        rows, columns = _window(region, start, end)
        parts = ((overlap, self._flat(kind, name, overlap)) for overlap in overlaps)
        target: Tensor | None = None
        for overlap, flat in parts:
            if target is None:
                shape = (rows.stop - rows.start, columns.stop - columns.start, region.inner)
                target = flat.new_zeros(shape)
            values = flat.view(overlap.rows, -1, region.inner).narrow(1, overlap.first, overlap.count)
            if overlap.count:
                target.narrow(1, overlap.target - columns.start, overlap.count).copy_(values)
        assert target is not None
        before = (rows.start * region.size + columns.start) * region.inner
        return target.view(-1)[start - before : end - before]

    def _flat(self, kind: str, name: str, overlap: _Overlap) -> Tensor:
        parts = [part[elements] for _, part, elements in self._covering(kind, name, overlap)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def scalars(self, name: str, region: Region, start: int, end: int) -> Mapping[str, float]:
        """Return the numbers that belong to a part of a region.

        :raises CheckpointError: The pieces that it is made of have different ones.
        """
        scalars_of_pieces = [piece.scalars for piece in self._used(name, region, start, end)]
        if any(scalars != scalars_of_pieces[0] for scalars in scalars_of_pieces):
            raise _damaged(f"The optimizer took different steps on the parts of {name}: {scalars_of_pieces}.")
        return scalars_of_pieces[0] if scalars_of_pieces else {}

    def kinds(self, name: str, region: Region, start: int, end: int) -> set[str]:
        """Return the kinds of state that are stored for a part of a region."""
        return {kind for piece in self._used(name, region, start, end) for kind in piece.kinds}

    def _used(self, name: str, region: Region, start: int, end: int) -> Iterator[Piece]:
        for overlap in self._regions(name, region, start, end):
            yield from (piece for piece, _ in self._pieces_of(name, overlap))

    def _overlaps(self, kind: str, name: str, region: Region, start: int, end: int) -> list[_Overlap]:
        """Return the pieces of a part of a region; empty if no piece has the kind."""
        overlaps = self._regions(name, region, start, end)
        pieces = (piece for overlap in overlaps for piece, _ in self._pieces_of(name, overlap))
        if not any(kind in piece.kinds for piece in pieces):
            return []
        missing = _wanted(region, start, end) - sum(overlap.count for overlap in overlaps)
        if missing > 0 and overlaps[0].region != region:
            raise CheckpointError(
                f"The checkpoint lacks {missing} indices of {kind} of {name} along dimension {region.dim}.",
                hint="Files of a rank are missing; resume from an earlier checkpoint.",
            )
        return overlaps

    def _regions(self, name: str, region: Region, start: int, end: int) -> list[_Overlap]:
        """Return what the stored regions have of a part of a region: all from one that is the same."""
        stored = self._pieces.get(name, {})
        if region in stored:
            return [_Overlap(region, start, end, 1, 0, 0, 0)] if end > start else []
        if end > start and not _wanted(region, start, end):  # padding: any index tells its types
            return [_Overlap(each, 0, each.inner, 1, 0, 0, 0) for each in list(stored)[:1]]
        return [overlap for each in stored for overlap in _common(each, region, start, end)]

    def _covering(self, kind: str, name: str, overlap: _Overlap) -> list[tuple[Piece, Any, slice]]:
        """Return pieces that are elements of one kind one after another, with the part to take of each."""
        covering, position = [], overlap.start
        for piece, handle in self._pieces_of(name, overlap):
            first, last = max(position, piece.start), min(overlap.end, piece.end)
            if kind not in piece.kinds or last <= first:
                continue
            if first > position:
                break
            part = _slice(handle, key(kind, name))
            covering.append((piece, part, slice(first - piece.start, last - piece.start)))
            position = last
        if position < overlap.end:
            raise CheckpointError(
                f"The checkpoint lacks elements {position} to {overlap.end} of {kind} of {name}.",
                hint="Files of a rank are missing; resume from an earlier checkpoint.",
            )
        return covering

    def _pieces_of(self, name: str, overlap: _Overlap) -> list[tuple[Piece, Any]]:
        held = self._pieces[name][overlap.region]
        pieces = [each for each in held if each[0].start < overlap.end and overlap.start < each[0].end]
        return sorted(pieces, key=lambda each: each[0].start)


def _window(region: Region, start: int, end: int) -> tuple[slice, slice]:
    """Return the rows and the indices along the dimension that hold a part of a region."""
    row = region.size * region.inner
    rows = slice(start // row, -(-end // row))
    if rows.stop - rows.start > 1:
        return rows, slice(0, region.size)
    before = rows.start * row
    return rows, slice((start - before) // region.inner, -(-(end - before) // region.inner))


def _wanted(region: Region, start: int, end: int) -> int:
    """Return how many indices along the dimension hold a part of a region, without padding."""
    _, columns = _window(region, start, end)
    filled = sum(last - first for first, last in region.stretches)
    return max(0, min(columns.stop, filled) - columns.start)


def _common(stored: Region, region: Region, start: int, end: int) -> Iterator[_Overlap]:
    """Yield what a stored region has of a part of another region of the same parameter."""
    if (stored.shape, stored.rows, stored.inner) != (region.shape, region.rows, region.inner):
        return
    rows, columns = _window(region, start, end)
    count, inner = rows.stop - rows.start, region.inner
    for here, first, last in _placed(region):
        low, high = max(first, first + columns.start - here), min(last, first + columns.stop - here)
        for there, begin, stop in _placed(stored):
            a, b = max(low, begin), min(high, stop)
            if a >= b:
                continue
            source, row = there + a - begin, stored.size * inner
            part = (rows.start * row, rows.stop * row)
            if count == 1:
                part = (part[0] + source * inner, part[0] + (source + b - a) * inner)
                source = 0
            yield _Overlap(stored, *part, count, source, here + a - first, b - a)


def _placed(region: Region) -> Iterator[tuple[int, int, int]]:
    """Yield where each stretch begins in the region, and where in the whole it begins and ends."""
    here = 0
    for first, last in region.stretches:
        yield here, first, last
        here += last - first


def _stored_dtype(part: Any, kind: str, piece: Piece) -> torch.dtype:
    """Return the type of a piece's tensor, which must be as long as the piece."""
    shape, known = part.get_shape(), {name: dtype for dtype, name in _DTYPES.items()}
    if shape != [piece.end - piece.start] or part.get_dtype() not in known:
        raise _damaged(
            f"{kind} of {piece.name} is stored as {part.get_dtype()} of shape {shape}, for elements "
            f"{piece.start} to {piece.end}."
        )
    return known[part.get_dtype()]


def _slice(handle: Any, name: str) -> Any:
    try:
        return handle.get_slice(name)
    except SafetensorError as error:
        raise _damaged(f"The checkpoint has no {name}, which its description names: {error}.") from error


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
        fields = read_json(path)
        number = fields["format"]
        if number == FORMAT:
            return RankFile(**fields | {"pieces": [_piece(each) for each in fields["pieces"]]})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _torn(path, f"{type(error).__name__}: {error}") from error
    raise CheckpointError(
        f"{path} has format {number}; this version reads format {FORMAT}.",
        hint="Load it with the version of anygauge that wrote it.",
    )


def _piece(fields: Mapping[str, Any]) -> Piece:
    region = fields["region"]
    shape, stretches = tuple(region["shape"]), tuple((first, last) for first, last in region["stretches"])
    return Piece(**{**fields, "region": Region(**{**region, "shape": shape, "stretches": stretches})})


def _torn(path: Path, reason: str) -> CheckpointError:
    return _damaged(f"{path} of a checkpoint cannot be read: {reason}.")


def _damaged(problem: str) -> CheckpointError:
    return CheckpointError(problem, hint="Resume from an earlier checkpoint.")
