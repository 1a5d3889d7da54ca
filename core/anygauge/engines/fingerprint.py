"""Exact fingerprints of tensors, which see the order of their elements; they read a tensor several times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["fingerprints"]

CHUNK = 2**20
"""Elements of a tensor that are widened to int64 at a time."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of as many bytes."""
_ODD = 0x2545F4914F6CDD1D
"""Any large odd number."""


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Return for each tensor a number that changes with any of its bits and with their order; int64 ``[n]``.

    A sum of the elements' bits as integers, each times an odd number of its place, modulo 2 ** 64: exact, so
    that every kind of device gives the same one. A change of one element always changes it.
    """
    device = tensors[0].device
    largest = max(tensor.numel() for tensor in tensors)
    factors = _factors(min(largest, CHUNK)).to(device)
    return torch.stack([_fingerprint(tensor.detach(), factors).to(device) for tensor in tensors])


def _fingerprint(tensor: Tensor, factors: Tensor) -> Tensor:
    bits = tensor.reshape(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros([], dtype=torch.int64, device=bits.device)
    for chunk in bits.split(CHUNK):
        total = total * _ODD + (chunk * factors[: len(chunk)]).sum()
    return total


def _factors(count: int) -> Tensor:
    """Return odd numbers ``[count]``, int64, that look like random ones.

    Made of their places, by the mixing step of https://doi.org/10.1145/2660193.2660195 section 4, lest they
    depend on a generator.
    """
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy((mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)).view(np.int64))
