"""How sequences are packed and masked, as values that can be keys of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Mask", "Packing"]


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


class Mask(NamedTuple):
    """Which keys of its sequence a query sees."""

    causal: bool
    window: int | None = None
    """How many of the last, itself among them; ``None`` for all."""

    @classmethod
    def of(cls, packing: Packing, causal: bool, window: int | None) -> Mask:
        """Return it for what an op is given; a window that hides nothing is none."""
        return cls(causal, window if window is not None and window < max(packing.keys) else None)
