"""The checksum of a tensor's bytes, the same on both sides of an update."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["DIGITS", "checksum", "checksum_of_parts", "digest", "digests"]

DIGITS = 16
"""Hexadecimal digits. A server on a CPU tells the same 64 bits of SHA-256 for its parameters."""


_COLUMNS = 64
"""Sums of a digest, each of every 64th word."""
_ODD = 0x9E3779B97F4A7C15
"""2 ** 64 over the golden ratio."""


def checksum(tensor: Tensor) -> str:
    """Return the checksum of a tensor's bytes in row-major order, whatever its dtype and device."""
    return checksum_of_parts([tensor])


def checksum_of_parts(parts: Iterable[Tensor]) -> str:
    """Return the checksum of the concatenation of tensors."""
    hasher = hashlib.sha256()
    for part in parts:
        held = _bytes_of(part)
        # A numpy array would fix the size of the storage for ever, which a trainer gives up and takes back.
        hasher.update((ctypes.c_ubyte * held.numel()).from_address(held.data_ptr()) if held.numel() else b"")
    return hasher.hexdigest()[:DIGITS]


def digest(tensor: Tensor) -> Tensor:
    """Return a hash that any flipped bit changes, computed asynchronously on the tensor's device.

    :returns: int64, no dimension.
    """
    return digests([tensor])[0]


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return the hashes ``[n]``, int64, of tensors on one device, which are read once, by one kernel each.

    Words of 8 bytes are added up in columns, and each column counts an odd number of times, modulo 2 ** 64:
    exact, so that every kind of device gives the same hash. Two words of one column in each other's place are
    not told apart.
    """
    import torch

    device = tensors[0].device if tensors else None
    sums = torch.zeros(len(tensors), _COLUMNS, dtype=torch.int64, device=device)
    for columns, tensor in zip(sums, tensors, strict=True):
        if count := (words := _words(tensor)).numel():
            width = math.gcd(count, _COLUMNS)
            torch.sum(words.view(-1, width), 0, dtype=torch.int64, out=columns[:width])
    return (sums * _factors(sums.device)).sum(1)


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as the widest integers that divide them: no sum has to widen 8 bytes."""
    import torch

    data = tensor.detach().contiguous().view(-1)
    size = math.gcd(data.nbytes, 8)
    if data.data_ptr() % size:
        data = data.clone()
    return data.view(torch.uint8).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


@cache
def _factors(device: torch.device) -> Tensor:
    import torch

    odd = [(number * _ODD | 1) % 2**64 for number in range(1, _COLUMNS + 1)]
    return torch.tensor([number - 2**64 if number >= 2**63 else number for number in odd], device=device)


def _bytes_of(tensor: Tensor) -> Tensor:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
