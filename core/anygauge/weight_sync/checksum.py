"""The checksum of a tensor's bytes, the same on both sides of an update."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DIGITS", "checksum", "checksum_of_parts", "digest"]

DIGITS = 16
"""Hexadecimal digits. A server on a CPU tells the same 64 bits of SHA-256 for its parameters."""


_SUMMED = 1 << 22
"""Words that a digest adds up at once."""


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

    The sum of its words: two words in each other's place are not told apart.

    :returns: int64, no dimension.
    """
    import torch

    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    words = tensor.detach().contiguous().view(word).reshape(-1)
    # a sum in a wider type copies what it adds up
    return torch.stack([part.sum(dtype=torch.int64) for part in torch.split(words, _SUMMED)]).sum()


def _bytes_of(tensor: Tensor) -> Tensor:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
