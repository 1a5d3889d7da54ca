"""Order of the rows: epoch after epoch, or from several data sets by weight.

Every order is a function of the seed and of how much was drawn, so that it needs no more than two numbers per
data set to go on from where it stood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Epochs", "Mixture", "Order"]

_CHOICES, _ROWS = 0, 1
"""Streams of random numbers: of the choices among data sets, and of the order of rows."""
Positions = NDArray[np.int64]


class Epochs:
    """Every row once, then again.

    :param num_rows: At least 1.
    :param seed: At least 0.
    :param dataset: Tells orders of one seed apart.
    :param shuffle: Whether each epoch has a random order of its own.
    """

    def __init__(self, num_rows: int, seed: int, *, dataset: int = 0, shuffle: bool = True) -> None:
        self._num_rows = num_rows
        self._seed = seed
        self._dataset = dataset
        self._shuffle = shuffle
        self._epoch = 0
        self._cursor = 0
        self._order: NDArray[np.uint32] | None = None

    def next(self, count: int) -> Positions:
        """Return the next positions ``[count]``. At the end of an epoch the next one begins."""
        parts: list[Positions] = []
        while count:
            if self._cursor == self._num_rows:
                self._epoch, self._cursor, self._order = self._epoch + 1, 0, None
            if self._order is None:
                self._order = self._shuffled()
            taken = self._order[self._cursor : self._cursor + count].astype(np.int64)
            self._cursor += len(taken)
            count -= len(taken)
            parts.append(taken)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def state(self) -> dict[str, Any]:
        """Return epoch and cursor."""
        return {"epoch": self._epoch, "cursor": self._cursor}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to another's epoch and cursor.

        :raises ValueError: There is no such row.
        """
        epoch, cursor = _natural(state, "epoch"), _natural(state, "cursor")
        if cursor > self._num_rows:
            raise ValueError(f"row {cursor} of {self._num_rows}")
        self._epoch, self._cursor, self._order = epoch, cursor, None

    def _shuffled(self) -> NDArray[np.uint32]:
        order = np.arange(self._num_rows, dtype=np.uint32)
        if self._shuffle:
            np.random.Generator(_bits(self._seed, _ROWS, self._dataset, self._epoch)).shuffle(order)
        return order


class Mixture:
    """Rows of several data sets in proportion to their weights, each in epochs of its own.

    :param sizes: Rows of each data set, at least 1; positions count through them in this order.
    :param weights: Above 0.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int, *, shuffle: bool = True
    ) -> None:
        self._seed = seed
        self._parts = [
            Epochs(size, seed, dataset=number, shuffle=shuffle) for number, size in enumerate(sizes)
        ]
        self._starts = np.cumsum([0, *sizes[:-1]])
        shares = np.asarray(weights, np.float64) / max(weights)  # so that their sum cannot overflow
        self._bounds = np.cumsum(shares / shares.sum())[:-1]
        self._drawn = 0

    def next(self, count: int) -> Positions:
        """Return the next positions ``[count]``; the n-th draw's data set depends on the seed and n alone."""
        bits = _bits(self._seed, _CHOICES)
        bits.advance(self._drawn)
        # The upper 53 bits, as a number from 0 to 1.
        numbers = (np.asarray(bits.random_raw(count), np.uint64) >> np.uint64(11)) * 2.0**-53
        chosen = np.searchsorted(self._bounds, numbers, side="right")
        positions = np.empty(count, np.int64)
        for number, part in enumerate(self._parts):
            places = np.flatnonzero(chosen == number)
            positions[places] = self._starts[number] + part.next(len(places))
        self._drawn += count
        return positions

    def state(self) -> dict[str, Any]:
        """Return the number of draws, and epoch and cursor of each data set."""
        return {"drawn": self._drawn, "datasets": [part.state() for part in self._parts]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to where another mixture of the same sizes stood; its weights may have been others.

        :raises ValueError: It cannot have stood there.
        """
        drawn, before = _natural(state, "drawn"), self.state()["datasets"]
        try:
            for part, saved in zip(self._parts, state["datasets"], strict=True):
                part.restore(saved)
        except (KeyError, TypeError, ValueError) as error:
            for part, saved in zip(self._parts, before, strict=True):
                part.restore(saved)
            raise ValueError(str(error)) from error
        self._drawn = drawn


Order = Epochs | Mixture
"""An endless sequence of positions."""


def _bits(seed: int, *stream: int) -> np.random.PCG64:
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=stream))


def _natural(state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{key} {value!r}")
    return value
