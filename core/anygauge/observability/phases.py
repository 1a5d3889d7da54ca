"""Phases of a process: what it did, and when, for the timeline of a run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

__all__ = ["PhaseTime", "Row", "record_phase", "take_phases"]

MOST = 10_000
"""Phases that are kept between two reports; a process that nobody asks forgets its oldest."""


class PhaseTime(NamedTuple):
    """One phase."""

    name: str
    start: float
    """Seconds since 1970."""
    seconds: float


class Row(NamedTuple):
    """A process, or a server, in the timeline. Workers have the names of their logs."""

    kind: Literal["driver", "actor", "rollout", "engine"]
    rank: int = 0

    @property
    def label(self) -> str:
        """Return its name in a viewer, such as ``actor-0``; there is one driver."""
        return self.kind if self.kind == "driver" else f"{self.kind}-{self.rank}"


_phases: deque[PhaseTime] = deque(maxlen=MOST)
"""Those of this process that ended since the last report."""


@contextmanager
def record_phase(name: str) -> Iterator[None]:
    """Record the block as a phase of this process, also if it raises."""
    start, clock = time.time(), time.perf_counter()
    try:
        yield
    finally:
        _phases.append(PhaseTime(name, start, time.perf_counter() - clock))


def take_phases() -> list[PhaseTime]:
    """Return and forget the phases that ended since the last call, in the order of their ends."""
    return [_phases.popleft() for _ in range(len(_phases))]
