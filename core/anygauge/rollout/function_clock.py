"""Limit on the time that rollout functions take for themselves."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["FunctionClock"]

Function = asyncio.Task[Any]
"""The task that a rollout function runs in."""


class FunctionClock:
    """Cancels functions that take longer for themselves than a limit.

    All functions have the same limit, so the one that began first is the first to be late: one timer is
    enough for the thousands of them that begin and end in a step, where ``asyncio.timeout`` takes one each.

    :param limit_s: Longest time between two generations.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._began: dict[Function, float] = {}
        self._late: set[Function] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, function: Function) -> None:
        """Count the time of a function from now on, unless it was late before."""
        if function in self._late:
            return
        loop = asyncio.get_running_loop()
        self._began.pop(function, None)
        self._began[function] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self.limit_s, self._cancel_late)

    def stop(self, function: Function) -> None:
        """Count no more while the policy generates for a function."""
        self._began.pop(function, None)

    def end(self, function: Function) -> bool:
        """Forget a function, and return whether it was cancelled for its time, and for nothing else."""
        self._began.pop(function, None)
        if function not in self._late:
            return False
        self._late.discard(function)
        return function.uncancel() == 0

    def _cancel_late(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        while self._began:
            function, began = next(iter(self._began.items()))
            if began + self.limit_s > loop.time():
                self._timer = loop.call_at(began + self.limit_s, self._cancel_late)
                return
            del self._began[function]
            self._late.add(function)
            function.cancel()
