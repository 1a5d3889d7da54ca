"""Activity of a server as the driver sees it, for the timeline of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from anygauge.observability.phases import PhaseTime
from anygauge.serving.engine_state import EngineState

__all__ = ["Activity"]

NAMES: Mapping[EngineState, str] = {
    **{"paused": "paused", "asleep": "asleep"},
    **{"unusable": "lost", "dead": "lost"},
}
"""Phase of an engine in each state but ``serving``."""


class Activity:
    """Phases of an engine: ``generate`` while it serves and has requests, else those of its state."""

    def __init__(self) -> None:
        self._state: EngineState = "serving"
        self._requests = 0
        self._name: str | None = None
        self._start = self._clock = 0.0
        self._phases: list[PhaseTime] = []

    def set_state(self, state: EngineState) -> None:
        """Learn the state of the engine."""
        self._state = state
        self._update()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count the block as a request of the engine."""
        self.add(1)
        try:
            yield
        finally:
            self.add(-1)

    def add(self, requests: int) -> None:
        """Learn that the engine has more requests, or fewer."""
        self._requests += requests
        self._update()

    def take(self) -> list[PhaseTime]:
        """Return and forget the phases until now; one that goes on begins anew."""
        name = self._name
        self._end()
        self._begin(name)
        phases, self._phases = self._phases, []
        return phases

    def _update(self) -> None:
        is_busy = self._state == "serving" and self._requests > 0
        name = "generate" if is_busy else NAMES.get(self._state)
        if name != self._name:
            self._end()
            self._begin(name)

    def _begin(self, name: str | None) -> None:
        self._name, self._start, self._clock = name, time.time(), time.perf_counter()

    def _end(self) -> None:
        if self._name is not None:
            self._phases.append(PhaseTime(self._name, self._start, time.perf_counter() - self._clock))
