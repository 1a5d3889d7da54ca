"""Tensors of one call of a collective: what goes in, and what must come out, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anygauge.testing.conformance.ranks import Group, Rank

__all__ = ["DTYPES", "LARGEST", "Trial", "pattern", "trials"]

DTYPES = ("float32", "bfloat16", "int64", "float16", "float64", "int32", "uint8", "bool")
LARGEST = {
    "float32": 1 << 20,
    "bfloat16": 31,
    "int64": 1 << 60,
    "float16": 500,
    "float64": 1 << 50,
    "int32": 1 << 28,
    "uint8": 60,
    "bool": 1,
}
"""Largest integer of each rank: sums of four are exact in the dtype, and in no narrower one."""
UNSIGNED = {"uint8", "bool"}
PERIOD = 4099
"""Numbers repeat, so that long tensors are quickly made; a prime, so that no block of them does."""
SIZES = (3, 1030, 1, 3)
"""Sizes of successive calls, every other one asynchronous: the last has the shape of the first."""
LARGE = (1 << 20) + 3
LONG_DTYPES = ("float32", "bfloat16")
"""The dtypes of long messages: gradients and weights, and activations."""
EDGE = 64
"""Elements before and after each tensor, which nobody may write."""
SHOWN = 4


@lru_cache(maxsize=512)
def pattern(source: int, dtype: str, salt: int) -> Tensor:
    """Return numbers that differ by rank, place and call."""
    largest = LARGEST[dtype]
    index = torch.arange(PERIOD)
    mixed = index * 2654435761 + (source + 1) * 40503 * (index % 7 + 1) + salt * 97
    for _ in range(2):  # the low bits of a product alone have short periods
        mixed = (mixed ^ (mixed >> 29)) * 6364136223846793005
    mixed = mixed >> 2
    low = 0 if dtype in UNSIGNED else -largest
    return (mixed % (largest - low + 1) + low).to(getattr(torch, dtype))


def tiled(numbers: Tensor, size: int) -> Tensor:
    """Return the first of these numbers, repeated for ever."""
    return numbers.repeat(-(-size // len(numbers)))[:size]


class Trial:
    """One call of a collective in one group.

    :param number: Number of the call; every other one is asynchronous.
    """

    def __init__(self, rank: Rank, group: Group, dtype: str, size: int, number: int) -> None:
        self.rank, self.group, self.dtype, self.size = rank, group, dtype, size
        self.handle, self.members = group.handle, group.members
        self.me = self.members.index(rank.rank)
        self.asynchronous = number % 2 == 1
        self.complaints: list[str] = []
        self._number = number
        self._frames: list[Tensor] = []

    @property
    def count(self) -> int:
        """Return the number of ranks in the group."""
        return len(self.members)

    @property
    def roots(self) -> Sequence[int]:
        """Return the ranks to send from or to: each, or one."""
        return self.members if self.size == SIZES[0] else self.members[-1:]

    def values(self, member: int, size: int | None = None, salt: int = 0) -> Tensor:
        """Return the numbers of a member of the group, on the host."""
        numbers = pattern(self.members[member], self.dtype, 10 * self._number + salt)
        return tiled(numbers, self.size if size is None else size)

    def all_values(self, size: int | None = None) -> list[Tensor]:
        """Return the numbers of each member."""
        return [self.values(member, size) for member in range(self.count)]

    def put(self, values: Tensor) -> Tensor:
        """Return a copy on the device, between elements that nobody may write."""
        place = self.rank.device.torch_device
        frame = torch.ones(values.numel() + 2 * EDGE, dtype=values.dtype, device=place)
        self._frames.append(frame)
        return frame[EDGE : EDGE + values.numel()].copy_(values)

    def room(self, size: int | None = None) -> Tensor:
        """Return a tensor to write to, with old numbers in it."""
        return self.put(self.values(self.me, size, salt=1))

    def reduced(self, op: str, size: int | None = None) -> Tensor:
        """Return what all members' numbers reduce to."""
        parts = torch.stack(self.all_values(PERIOD))
        if op in ("MAX", "MIN") or self.dtype == "bool":  # a sum of booleans is whether one is true
            result = parts.amin(0) if op == "MIN" else parts.amax(0)
        else:
            total = parts.to(torch.float64 if parts.is_floating_point() else torch.int64).sum(0)
            result = (total / self.count if op == "AVG" else total).to(parts.dtype)
        return tiled(result, self.size if size is None else size)

    def finish(self, work: Any) -> None:
        """Wait for work that was started asynchronously."""
        if self.asynchronous:
            work.wait()

    def expect(self, found: Tensor, wanted: Tensor, what: str = "the result") -> None:
        """Complain unless a tensor has these numbers."""
        found = found.reshape(-1)
        wanted = wanted.to(found.device).reshape(-1)
        if torch.equal(found, wanted):
            return
        wrong = (found != wanted).nonzero().flatten()
        first = wrong[:SHOWN]
        self.complain(
            f"{what} is wrong in {len(wrong)} of {len(wanted)} elements, at {first.tolist()}: "
            f"expected {wanted[first].tolist()}, found {found[first].tolist()}"
        )

    def complain(self, text: str) -> None:
        """Note what is wrong."""
        way = "asynchronously" if self.asynchronous else "synchronously"
        self.complaints.append(f"{self.size} x {self.dtype}, {self.group}, {way}: {text}")

    def settle(self) -> list[str]:
        """Return every complaint, after a look at what lies around the tensors."""
        for frame in self._frames:
            if not bool((frame[:EDGE] == 1).all() & (frame[len(frame) - EDGE :] == 1).all()):
                self.complain("memory before or behind a tensor was overwritten")
        return self.complaints


def trials(rank: Rank, dtype: str, *, divided: bool) -> Iterator[Trial]:
    """Yield calls of some sizes in each group, and two with more than 2^20 elements.

    One of these is asynchronous, and one is in a group that may lack ranks. Dtypes beside float32 are in
    two groups, and those that no large tensor has have few elements.

    :param divided: Whether it is the ranks' tensors together that have so many elements.
    """
    is_first = dtype == DTYPES[0]
    for group in rank.groups if is_first else rank.groups[:2]:
        for number, size in enumerate(SIZES):
            yield Trial(rank, group, dtype, size, number)
    for number, group in enumerate(rank.groups[:2] if dtype in LONG_DTYPES else ()):
        size = LARGE // len(group.members) + 1 if divided else LARGE
        yield Trial(rank, group, dtype, size, number + is_first)
