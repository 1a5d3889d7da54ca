"""The slots of one data-parallel rank, in which requests take time and nothing else."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from anygauge_tests.fake_engine.active_request import ActiveRequest
from anygauge_tests.fake_engine.options import Options

__all__ = ["Scheduler"]


@dataclass(slots=True)
class _Running:
    """A request in a slot."""

    request: ActiveRequest
    base: int
    """Tokens that it had when it began."""
    began: float
    """When the token after those was begun, on the loop's clock."""
    timer: asyncio.TimerHandle | None = None
    doomed: bool = False
    """Aborted while nothing moves: it ends with the next forward pass."""


class Scheduler:
    """Runs requests in slots, others wait. One timer per request, whatever its length."""

    def __init__(self, options: Options, version: str) -> None:
        self.version = version
        self.slow = 1.0
        """Factor on all times."""
        self._options = options
        self._waiting: deque[ActiveRequest] = deque()
        self._running: dict[str, _Running] = {}
        self._paused = False
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def running(self) -> int:
        """Return how many requests have a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Return how many requests have none."""
        return len(self._waiting)

    def submit(self, request: ActiveRequest) -> None:
        """Take a request on."""
        self._waiting.append(request)
        self._admit()

    def update(self, request: ActiveRequest) -> None:
        """Bring the count of a request's tokens up to date."""
        if (slot := self._running.get(request.rid)) is not None and not self._paused:
            self._settle(slot)

    def abort(self, rid: str | None) -> None:
        """End the requests whose ids begin with this one, as the real scheduler does; ``None`` ends all."""
        for request in [each for each in self._waiting if rid is None or each.rid.startswith(rid)]:
            self._waiting.remove(request)
            request.abort(queued=True)
        for slot in [each for key, each in self._running.items() if rid is None or key.startswith(rid)]:
            if self._paused:
                slot.doomed = True
            else:
                self._settle(slot)
                self._release(slot)
                slot.request.abort(queued=False)
        self._admit()

    def pause(self, *, retract: bool) -> None:
        """Let no token be made; with ``retract`` what runs goes back to the queue and loses its cache."""
        if not self._paused:
            for slot in self._running.values():
                self._settle(slot)
                self._stop_timer(slot)
        self._paused = True
        if retract:
            for slot in reversed(self._running.values()):
                slot.request.retractions += 1
                self._waiting.appendleft(slot.request)
            self._running.clear()

    def resume(self) -> None:
        """Go on."""
        if not self._paused:
            return
        self._paused = False
        for slot in list(self._running.values()):
            if slot.doomed:
                self._release(slot)
                slot.request.abort(queued=False)
            else:
                self._start(slot, first=False)
        self._admit()

    def change_version(self, version: str) -> None:
        """Make what is still to come with other weights."""
        for slot in list(self._running.values()):
            if not self._paused:
                self._settle(slot)
            slot.request.change_version(self.version, version)
            if not self._paused:
                self._start(slot, first=False)
        for request in self._waiting:
            request.change_version(self.version, version)
        self.version = version

    def set_slow(self, factor: float) -> None:
        """Multiply all times from now on."""
        moving = [] if self._paused else list(self._running.values())
        for slot in moving:
            self._settle(slot)
        self.slow = factor
        for slot in moving:
            self._start(slot, first=False)

    def _admit(self) -> None:
        while not self._paused and self._waiting and len(self._running) < self._options.slots:
            request = self._waiting.popleft()
            request.plan(self.version)
            slot = self._running[request.rid] = _Running(request, request.done, 0.0)
            self._start(slot, first=True)

    def _start(self, slot: _Running, *, first: bool) -> None:
        self._stop_timer(slot)
        slot.base = slot.request.done
        slot.began = self._loop.time() + (self._options.start_s * self.slow if first else 0.0)
        left = slot.request.end - slot.base
        at = slot.began + left * self._options.token_s * self.slow
        slot.timer = self._loop.call_at(at, self._finish, slot)

    def _finish(self, slot: _Running) -> None:
        self._release(slot)
        slot.request.finish()
        self._admit()

    def _settle(self, slot: _Running) -> None:
        """Count the tokens that a running request has by now; the last one comes with its timer."""
        each = self._options.token_s * self.slow
        gone = self._loop.time() - slot.began
        made = int(gone / each) if each > 0 and gone > 0 else 0
        slot.request.done = max(slot.base, min(slot.base + made, slot.request.end - 1))

    def _release(self, slot: _Running) -> None:
        self._stop_timer(slot)
        self._running.pop(slot.request.rid, None)

    @staticmethod
    def _stop_timer(slot: _Running) -> None:
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None

    def requests(self) -> Iterator[ActiveRequest]:
        """Yield every request that has not finished."""
        yield from (slot.request for slot in self._running.values())
        yield from self._waiting
