"""Weight deltas: the changed bytes of a tensor, and their positions.

An element that changed is sent as its difference (exclusive or) from the old one, byte plane by byte plane: a
small step of training changes the low bytes, so the high planes are zeros, which cost nothing. Where the
elements are is a bit each, or the gaps between those that changed. All is compressed where that helps.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.weights import WeightTensor

__all__ = ["Change", "apply_change", "bytes_view", "changed", "framed", "unframed", "whole"]

_HEADER = struct.Struct("<IBQQQ8s")
"""Tensor, flags, elements that changed, bytes of the places, bytes of the differences, checksum."""
_WHOLE, _BITS_COMPRESSED, _GAPS = 1, 2, 4
_SPARSE = 16
"""Threshold of sparse changes: below one changed element in this many, gaps between them are smaller than a
bit mask."""
_PLANE = struct.Struct("<BQ")
"""Header of each plane: whether it is compressed, and its bytes."""
_LENGTH = struct.Struct("<Q")
_LEVEL = 1
_SAMPLE = 1 << 14
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Bytes = NDArray[np.uint8]


class Change(NamedTuple):
    """Encoded difference between a tensor and its next version."""

    tensor: int
    """Its number in the order of the weights."""
    flags: int
    elements: int
    """Elements that changed."""
    places: bytes
    """A bit per element, or gaps; empty where all changed, or the whole tensor is sent."""
    values: bytes
    """Differences of these elements, plane by plane; or the whole tensor."""
    checksum: str
    """Checksum of the tensor after the change."""


def bytes_view(tensor: Tensor) -> Bytes:
    """Return a contiguous host tensor's bytes, as an array that shares its memory."""
    import torch

    view: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return view


def whole(number: int, new: Bytes, checksum: str) -> Change:
    """Return a whole tensor as a change, for receivers without a version of it."""
    return Change(number, _WHOLE, 0, b"", new.tobytes(), checksum)


def changed(number: int, old: Bytes, new: Bytes, itemsize: int) -> Change | None:
    """Return the change of a tensor, without its checksum yet; ``None`` if it did not change."""
    word = _WORDS.get(itemsize, np.uint8)
    difference = old.view(word) ^ new.view(word)
    moved = difference != 0
    count = int(np.count_nonzero(moved))
    if not count:
        return None
    flags, places = 0, b""
    if count < difference.size:
        places, flags = _written_places(moved, count)
    words = difference[moved].view(np.uint8).reshape(count, -1)
    values = _written_planes(np.ascontiguousarray(words.T))
    return Change(number, flags, count, places, values, "")


def _written_places(moved: NDArray[np.bool_], count: int) -> tuple[bytes, int]:
    """Return where elements changed, and how that is written."""
    if count * _SPARSE > moved.size:
        return _compressed(np.packbits(moved).tobytes(), _BITS_COMPRESSED)
    gaps = np.diff(np.flatnonzero(moved), prepend=0).astype(np.uint32)
    return _written_planes(np.ascontiguousarray(gaps.view(np.uint8).reshape(count, -1).T)), _GAPS


def _read_places(change: Change, size: int) -> Any:
    """Return an index of the elements that changed."""
    if change.flags & _GAPS:
        gaps = np.ascontiguousarray(_read_planes(change.places, 4, change.elements).T)
        return np.cumsum(gaps.reshape(-1).view(np.uint32), dtype=np.int64)
    bits = zlib.decompress(change.places) if change.flags & _BITS_COMPRESSED else change.places
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=size).astype(bool)


def _written_planes(planes: NDArray[np.uint8]) -> bytes:
    """Return byte planes one after the other, each compressed or not."""
    parts = []
    for plane in planes:
        data, flag = _compressed(plane.tobytes(), 1)
        parts += [_PLANE.pack(flag, len(data)), data]
    return b"".join(parts)


def _compressed(data: bytes, flag: int) -> tuple[bytes, int]:
    """Return data compressed, and the flag, where the first of it gets shorter so; else as it is, and 0."""
    sample = data[:_SAMPLE]
    if len(zlib.compress(sample, _LEVEL)) > 0.9 * len(sample):
        return data, 0
    return zlib.compress(data, _LEVEL), flag


def apply_change(change: Change, held: Bytes, itemsize: int) -> None:
    """Turn the bytes of a tensor into its next version, in place.

    :raises ValueError: The change does not fit the tensor.
    """
    if change.flags & _WHOLE:
        if len(change.values) != held.size:
            raise ValueError(f"{len(change.values)} bytes for a tensor of {held.size}")
        held[:] = np.frombuffer(change.values, np.uint8)
        return
    word = _WORDS.get(itemsize, np.uint8)
    words = held.view(word)
    planes = _read_planes(change.values, np.dtype(word).itemsize, change.elements)
    difference = np.ascontiguousarray(planes.T).reshape(-1).view(word)
    if not change.places:
        words ^= difference
        return
    words[_read_places(change, words.size)] ^= difference


def _read_planes(data: bytes, count: int, length: int) -> NDArray[np.uint8]:
    planes, at = [], 0
    for _ in range(count):
        flag, size = _PLANE.unpack_from(data, at)
        at += _PLANE.size
        plane = data[at : at + size]
        at += size
        planes.append(np.frombuffer(zlib.decompress(plane) if flag else plane, np.uint8))
    if any(plane.size != length for plane in planes):
        raise ValueError("the planes of a change are of different lengths")
    return np.stack(planes)


def framed(places: Sequence[WeightTensor], changes: Sequence[Change]) -> bytes:
    """Serialize changes.

    :param places: Tensors that the changes are about, where the receiver does not know them yet.
    """
    names = json.dumps([each[:3] for each in places]).encode() if places else b""
    parts: list[bytes] = [_LENGTH.pack(len(names)), names]
    for each in changes:
        header = (each.tensor, each.flags, each.elements, len(each.places), len(each.values))
        parts += [_HEADER.pack(*header, bytes.fromhex(each.checksum)), each.places, each.values]
    return b"".join(parts)


def unframed(data: bytes) -> tuple[list[tuple[str, list[int], str]], list[Change]]:
    """Deserialize bytes of :func:`framed`: name, shape and dtype of tensors, and changes.

    :raises ValueError: They end too early.
    """
    if len(data) < _LENGTH.size:
        raise ValueError("a message ends within its length")
    at = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    places = json.loads(data[_LENGTH.size : at]) if at > _LENGTH.size else []
    return [(name, shape, dtype) for name, shape, dtype in places], _read_changes(data, at)


def _read_changes(data: bytes, at: int) -> list[Change]:
    changes = []
    while at < len(data):
        if at + _HEADER.size > len(data):
            raise ValueError("a change ends within its header")
        number, flags, count, places, values, checksum = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        if at + places + values > len(data):
            raise ValueError("a change ends before its last byte")
        parts = (data[at : at + places], data[at + places : at + places + values])
        at += places + values
        changes.append(Change(number, flags, count, *parts, checksum.hex()))
    return changes
