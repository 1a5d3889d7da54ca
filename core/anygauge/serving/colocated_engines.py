"""Colocated rollout engines: servers that sleep while the trainers on the same devices work."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from anygauge.failures import on_failure
from anygauge.serving.colocation import ColocationScheduler
from anygauge.serving.served_engines import ServedEngines

__all__ = ["ColocatedEngines"]

T = TypeVar("T")


class ColocatedEngines(ServedEngines):
    """The servers of a run that sleep while the trainers work.

    A server that was lost while others generate gets no request before the next sync: trainers could not send
    it weights without taking the memory of the others.

    :param colocation: Scheduler of the shared devices; the trainers sleep while the servers start.
    """

    def __init__(self, *args: Any, colocation: ColocationScheduler, **others: Any) -> None:
        super().__init__(*args, **others)
        self._colocation = colocation
        colocation.join(self._servers.set_memory_state, self._refresh, lambda: not self._servers.lost())

    def wait(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """Run a coroutine in the event loop, with the servers awake."""
        with on_failure(coroutine.close):
            self._colocation.enter("generate")
        return super().wait(coroutine, what)

    def sync(self, version: int) -> None:
        """Send the trained weights to every server. The servers then sleep until they generate."""
        self._version = version
        self._colocation.enter("sync")
        self._refresh()
        self._colocation.synced()

    def _repair(self) -> None:
        """Have lost servers started again, and give them weights if there is no other to generate."""
        self._servers.look()
        if self._servers.behind and not self._servers.is_serving():
            self._colocation.outdated()
            self._colocation.enter("generate")

    def _refresh(self) -> None:
        """Send the trainers' weights to every server that can take them."""
        well = sorted(self._servers.synced - self._servers.lost().keys())
        self._servers.behind.difference_update(well)
        assert self._trainers is not None, "devices are shared with trainers"
        self._give(self._trainers, well)
