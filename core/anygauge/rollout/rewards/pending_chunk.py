"""Chunks of items to score, and their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from anygauge.rollout.rewards.call import Item, Outcome

__all__ = ["PendingChunk"]


@dataclass(slots=True)
class PendingChunk:
    """A chunk on its way, and where its outcomes belong."""

    call: int
    items: Sequence[Item]
    positions: Sequence[int]
    """Positions of the items in their job."""
    results: list[Sequence[Outcome]]
    """Results of the job."""
    place: Callable[[int], str]
    """Names the prompt of a position."""
    suspect: bool = False
    """A single item, which may have ended a process before."""
    open: set[int] = field(init=False)
    """Indices of the items without an outcome."""

    def __post_init__(self) -> None:
        self.open = set(range(len(self.items)))

    def settle(self, index: int, outcomes: Sequence[Outcome]) -> None:
        """Record the outcome of an item."""
        self.results[self.positions[index]] = outcomes
        self.open.discard(index)

    def remaining(self, size: int) -> list[PendingChunk]:
        """Return the open items, in chunks of at most ``size``."""
        left = sorted(self.open)
        return [self._some(left[start : start + size]) for start in range(0, len(left), size)]

    def suspects(self) -> list[PendingChunk]:
        """Return the open items, in chunks of one."""
        return [self._some([index], suspect=True) for index in sorted(self.open)]

    def _some(self, indices: Sequence[int], *, suspect: bool = False) -> PendingChunk:
        items = [self.items[index] for index in indices]
        positions = [self.positions[index] for index in indices]
        return PendingChunk(self.call, items, positions, self.results, self.place, suspect=suspect)
