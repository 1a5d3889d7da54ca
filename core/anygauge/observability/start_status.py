"""Status lines of a start: how many processes of a role are ready, and since when they are waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["StartStatus"]

CHANGED_S = 3.0
"""Least seconds between two lines where the number has changed."""
SAME_S = 15.0
"""Least seconds between two lines of the same number."""
_DONE = {"start": "prepared", "connect": "ready", "serve": "serving"}
"""State of a worker that has answered a call, by its method."""


class StartStatus:
    """Tells now and then how far the workers of a role are; nothing of a start that takes a moment.

    Example line: ``rollout engines: 3 of 8 serving, 42 s``

    :param tell: Called with a line.
    :param name: Name of the workers.
    :param clock: Seconds, as ``time.monotonic``.
    """

    def __init__(
        self, tell: Callable[[str], None], name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell, self._name, self._clock = tell, name, clock
        self._began = self._told_at = clock()
        self._told = ("", -1)

    def __call__(self, method: str, answered: int, total: int) -> None:
        """Take note of how many workers have answered a call.

        :param method: Method that they work on.
        """
        now = self._clock()
        pause = SAME_S if self._told == (method, answered) else CHANGED_S
        if method in _DONE and now - self._told_at >= pause:
            self._told, self._told_at = (method, answered), now
            self._tell(f"{self._name}: {answered} of {total} {_DONE[method]}, {now - self._began:.0f} s")
