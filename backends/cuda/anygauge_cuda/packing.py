"""How sequences are packed, as a value that can be a key of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Packing"]


class Packing(NamedTuple):
    """Lengths of packed sequences, on the host."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], key_lengths: Sequence[int] | None) -> Packing:
        """Return it for the lengths that an op is given."""
        queries = tuple(lengths)
        return cls(queries, queries if key_lengths is None else tuple(key_lengths))

    @property
    def is_square(self) -> bool:
        """Whether each sequence has as many queries as keys."""
        return self.queries == self.keys
