"""The servers of a run as a fleet, in which those that are lost are replaced by themselves started again.

A start takes long and needs nothing of the driver's own thread, so it begins as soon as a server is found
dead, in the worker that looks after it. The fleet gets it back without requests: it has old weights.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from anygauge.config import Config
from anygauge.rollout.fleet import EngineReport, EngineState, Fleet
from anygauge.trainer.event_loop import EventLoop
from anygauge.trainer.server_workers import Serving
from anygauge.trainer.worker_group import WorkerGroup
from anygauge_hooks.engines import Residency
from anygauge_hooks.errors import RolloutError

__all__ = ["Servers"]

_log = logging.getLogger(__name__)
RESTARTS = 3
"""Of a server between two answers that were waited for; one that ends more often ends the run."""
LOST = ("unusable", "dead")


class Servers:
    """A fleet whose servers are started again. Its methods are called in the driver's own thread.

    :param workers: Those that look after the servers, one each.
    :param loop: Of the fleet.
    """

    def __init__(self, config: Config, workers: WorkerGroup, loop: EventLoop) -> None:
        self._workers = workers
        self._loop = loop
        self.serving: list[Serving] = workers.call("serve", timeout_s=config.placement.start_timeout_s)
        """By rank."""
        self.behind: set[int] = set()
        """Those that are up again and have other weights than the rest; they get no requests."""
        self._proven = [server.incarnation for server in self.serving]
        self._lock = threading.Lock()
        """Of the workers, which take one call at a time, and of what is known of the servers."""
        self._is_closed = False
        self._rests = False
        """Whether the servers have no room to start in."""
        self._failure: Exception | None = None
        self.fleet = loop.run(_made(config, self.serving, self._died))

    def lost(self) -> dict[int, str]:
        """Return which servers cannot be used, and why."""
        reports = enumerate(self._loop.run(_reports(self.fleet)).values())
        return {rank: report.reason for rank, report in reports if report.state in LOST}

    def look(self) -> None:
        """Have lost servers started again, and take back those that have been.

        :raises RolloutError: One cannot be started, or was lost again and again.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not (self._is_closed or self._rests) and (lost := self.lost()):
                self._look(lost)

    def _look(self, lost: Mapping[int, str]) -> None:
        self._check_restarts(lost)
        found = self._workers.call("look", lost={rank: self.serving[rank].incarnation for rank in lost})
        news = {
            rank: now
            for rank, (then, now) in enumerate(zip(self.serving, found, strict=True))
            if now is not None and now.incarnation != then.incarnation
        }
        for rank, server in news.items():
            self.serving[rank] = server
        self.behind |= news.keys()
        self._loop.run(_replace(self.fleet, news))

    def _died(self, name: str, reason: str) -> None:
        """Have a server started again from the event loop, whatever the driver's own thread is doing."""
        asyncio.get_running_loop().run_in_executor(None, self._look_behind)

    def _look_behind(self) -> None:
        try:
            self.look()
        except Exception as error:  # noqa: BLE001 - it goes to the driver's own thread
            self._failure = error

    def _check_restarts(self, lost: Mapping[int, str]) -> None:
        for rank, reason in lost.items():
            if self.serving[rank].incarnation - self._proven[rank] >= RESTARTS:
                raise RolloutError(
                    f"Rollout engine {rank} was lost again after {RESTARTS} restarts: {reason}",
                    hint="Look into its log in the run directory, logs/rollout-*.",
                )

    def prove(self) -> None:
        """Note that what was waited for is there: the restarts before it count no more."""
        self._proven = [server.incarnation for server in self.serving]

    def hold(self, what: Residency) -> None:
        """Have the servers hold that much on their devices.

        Unless it is everything, those that are lost are ended, and started again only when it is.
        """
        with self._lock:
            self._rests = what != "everything"
        self._loop.run(self.fleet.hold_all(what))
        with self._lock:
            if self._rests and (lost := self.lost()):
                self._workers.call("end", ranks=sorted(lost))

    def is_serving(self) -> bool:
        """Return whether any server gets requests."""
        return any(each.state == "serving" for each in self._loop.run(_reports(self.fleet)).values())

    def mark(self, ranks: Collection[int], state: EngineState) -> None:
        """Let servers serve, or pause them; one that is lost meanwhile stays lost."""
        self._loop.run(_mark(self.fleet, ranks, state))

    def distrust(self, reasons: Mapping[int, str]) -> None:
        """Give servers up whose weights are not what they should be, for a reason each."""
        self._loop.run(_distrust(self.fleet, reasons))

    def reports(self) -> list[Mapping[str, Any]]:
        """Return and reset what each worker reports."""
        with self._lock:
            reports: list[Mapping[str, Any]] = self._workers.call("report")
            return reports

    def describe(self) -> str:
        """Return how each server is, for an error."""
        return ", ".join(
            f"{name} is {report.state} with {sum(load.requests for load in report.loads)} requests"
            for name, report in self._loop.run(_reports(self.fleet)).items()
        )

    def close(self) -> None:
        """Let go of the servers; nothing is started again any more. The workers end them."""
        with self._lock:
            self._is_closed = True
        self._loop.run(self.fleet.close())


def _name(rank: int) -> str:
    """Return how the fleet and its errors call a server."""
    return f"engine {rank}"


async def _made(config: Config, serving: Sequence[Serving], died: Callable[[str, str], None]) -> Fleet:
    fleet = Fleet(config.rollout.client, died=died)
    for rank, server in enumerate(serving):
        fleet.add(_name(rank), server.address)
    return fleet


async def _reports(fleet: Fleet) -> Mapping[str, EngineReport]:
    return fleet.report()


async def _replace(fleet: Fleet, serving: Mapping[int, Serving]) -> None:
    for rank, server in serving.items():
        fleet.add(_name(rank), server.address, state="paused")


async def _mark(fleet: Fleet, ranks: Collection[int], state: EngineState) -> None:
    for rank in ranks:
        if fleet.report()[_name(rank)].state not in LOST:
            fleet.mark(_name(rank), state)


async def _distrust(fleet: Fleet, reasons: Mapping[int, str]) -> None:
    for rank, reason in reasons.items():
        fleet.mark(_name(rank), "unusable", reason)
