"""The checksum of a tensor's bytes, the same on both sides of an update."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DIGITS", "checksum", "checksum_of_parts"]

DIGITS = 16
"""Hexadecimal digits. A server on a CPU tells the same 64 bits of SHA-256 for its parameters."""


def checksum(tensor: Tensor) -> str:
    """Return the checksum of a tensor's bytes in row-major order, whatever its dtype and device."""
    return checksum_of_parts([tensor])


def checksum_of_parts(parts: Iterable[Tensor]) -> str:
    """Return the checksum of tensors that lie one after the other."""
    hasher = hashlib.sha256()
    for part in parts:
        held = _bytes_of(part)
        # A numpy array would fix the size of the storage for ever, which a trainer gives up and takes back.
        hasher.update((ctypes.c_ubyte * held.numel()).from_address(held.data_ptr()) if held.numel() else b"")
    return hasher.hexdigest()[:DIGITS]


def _bytes_of(tensor: Tensor) -> Tensor:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
