"""Limit on the time that rollout functions take for themselves."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

__all__ = ["FunctionClock", "OwnTime"]


class OwnTime:
    """Since when a function has worked for itself; the time stands still while the policy generates for it.

    Set by every generation of a step, so it does no more than note a time. The clock looks at it later.
    """

    __slots__ = ("generations", "is_late", "since", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        """Runs the function, and is cancelled if that is late."""
        self.since: float | None = None
        self.is_late = False
        self.generations = 0

    def pause(self) -> None:
        """Count no more: the policy generates for the function."""
        self.generations += 1
        self.since = None

    def resume(self) -> None:
        """Count from now on, if nothing else is generated for it."""
        self.generations -= 1
        if not self.generations:
            self.since = monotonic()


class FunctionClock:
    """Cancels functions that take longer for themselves than a limit.

    All functions have the same limit, so one timer is enough for the thousands of them that begin and end in
    a step, where ``asyncio.timeout`` takes one each. It ends when the first can be late.

    :param limit_s: Longest time between two generations.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._functions: set[OwnTime] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, function: OwnTime) -> None:
        """Limit a function from now on."""
        function.since = monotonic()
        self._functions.add(function)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.limit_s, self._cancel_late)

    def end(self, function: OwnTime) -> bool:
        """Forget a function, and return whether it was cancelled for its time, and for nothing else."""
        self._functions.discard(function)
        return function.is_late and function.task is not None and function.task.uncancel() == 0

    def _cancel_late(self) -> None:
        now, first = monotonic(), None
        for function in self._functions:
            if function.since is None or function.is_late:
                continue
            if function.since + self.limit_s <= now:
                assert function.task is not None, "rollouts run in tasks"
                function.is_late = function.task.cancel()
            elif first is None or function.since < first:
                first = function.since
        rest_s = self.limit_s if first is None else first + self.limit_s - now
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(rest_s, self._cancel_late) if self._functions else None
