"""Servers of a run: an engine pool for each model, in which lost servers are restarted.

A start takes long and needs nothing of the driver's own thread, so it begins as soon as a server is found
dead, in the worker that supervises it. It returns to the pool without requests, since its weights are old.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from anygauge.config import Config
from anygauge.config.schema import POLICY
from anygauge.observability.performance import WorkerReport
from anygauge.observability.phases import PhaseTime, Row
from anygauge.runtime.event_loop import EventLoop
from anygauge.serving.engine_pool import EnginePool
from anygauge.serving.engine_state import EngineReport, EngineState
from anygauge.serving.server_plan import plan_servers
from anygauge.serving.server_sources import ServerSource
from anygauge.serving.server_workers import Serving
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.media import MediaStore
from anygauge_hooks.serving import MemoryState

__all__ = ["Servers"]

_log = logging.getLogger(__name__)
RESTARTS = 3
"""Most restarts of a server between two answers; more end the run."""
LOST = ("unusable", "dead")


class Servers:
    """Engine pools whose servers are restarted. Its methods are called in the driver's own thread.

    :param loop: Event loop of the pools.
    :param store: Store of the run's media; ``None`` in a run of text.
    """

    def __init__(
        self, config: Config, source: ServerSource, loop: EventLoop, store: MediaStore | None = None
    ) -> None:
        self._source = source
        self._loop = loop
        self._plans = plan_servers(config)
        self.serving: list[Serving] = source.serve()
        """Servers by rank."""
        self.has_first_weights = source.has_first_weights
        """Whether servers come with the weights of version 0."""
        self.synced = {plan.rank for plan in self._plans if plan.is_synced}
        """Ranks of servers that get the trained weights."""
        self.behind = set() if self.has_first_weights else set(self.synced)
        """Ranks of synced servers with old weights; they get no requests."""
        self._proven = [server.incarnation for server in self.serving]
        self._profiled: Mapping[str, Path] = {}
        """Directory of the profile that a server records, by its name in its pool."""
        self._lock = threading.Lock()
        """Lock around the workers, which take one call at a time, and the state of the servers."""
        self._away = set[int]()
        """Ranks of servers that are being restarted."""
        self._is_closed = False
        self._rests = False
        """Whether the servers have no room to start in."""
        self._failure: BaseException | None = None
        models = {plan.model for plan in self._plans}
        self.pools: Mapping[str, EnginePool] = loop.call(
            lambda: {
                model: EnginePool(config.rollout.client, died=self._died, store=store) for model in models
            }
        )
        """Pools by name of the model."""
        self._join(range(len(self._plans)))

    @property
    def pool(self) -> EnginePool:
        """Engine pool of the trained model."""
        return self.pools[POLICY]

    def _join(self, ranks: Collection[int]) -> None:
        """Add servers to their pools; those with old weights get no requests yet."""

        def add_all() -> None:
            for rank in ranks:
                self.pools[self._plans[rank].model].add(
                    _name(rank),
                    self.serving[rank].peer,
                    kind=self._plans[rank].kind,
                    state="paused" if rank in self.behind else "serving",
                )

        self._loop.call(add_all)

    def lost(self) -> dict[int, str]:
        """Return which servers cannot be used, and why."""
        reports = self._reports()
        return {rank: report.reason for rank, report in reports.items() if report.state in LOST}

    def _reports(self) -> dict[int, EngineReport]:
        """Return how each server is, by rank."""
        reports = self._loop.call(lambda: {name: pool.report() for name, pool in self.pools.items()})
        return {plan.rank: reports[plan.model][_name(plan.rank)] for plan in self._plans}

    def look(self) -> None:
        """Restart lost servers, and take back restarted ones.

        :raises RolloutError: One cannot be started, or was lost again and again.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not (self._is_closed or self._rests) and (lost := self.lost()):
                self._look(lost)

    def _look(self, lost: Mapping[int, str]) -> None:
        self._check_restarts(lost)
        for rank in lost.keys() - self._away:
            _log.warning("engine %d is started again: %s", rank, lost[rank])
        self._away |= lost.keys()
        current = self._source.look({rank: self.serving[rank].incarnation for rank in lost})
        news = {
            rank: now
            for rank, (then, now) in enumerate(zip(self.serving, current, strict=True))
            if now is not None and now.incarnation != then.incarnation
        }
        for rank, server in news.items():
            self.serving[rank] = server
        self._away -= news.keys()
        self.behind |= news.keys() & self.synced
        self._join(news)

    def _died(self, name: str, reason: str) -> None:
        """Have a server started again from the event loop, whatever the driver's own thread is doing."""
        looking = asyncio.get_running_loop().run_in_executor(None, self.look)
        looking.add_done_callback(self._keep_failure)

    def _keep_failure(self, looking: asyncio.Future[None]) -> None:
        """Keep what was raised for the driver's own thread."""
        if not looking.cancelled():
            self._failure = looking.exception() or self._failure

    def _check_restarts(self, lost: Mapping[int, str]) -> None:
        for rank, reason in lost.items():
            if self.serving[rank].incarnation - self._proven[rank] >= RESTARTS:
                raise RolloutError(
                    f"Rollout engine {rank} was lost again after {RESTARTS} restarts: {reason}",
                    hint="See its log; that of a server of the run is logs/rollout-* in its directory.",
                )

    def prove(self) -> None:
        """Note progress: earlier restarts no longer count toward the limit."""
        self._proven = [server.incarnation for server in self.serving]

    def set_memory_state(self, state: MemoryState) -> None:
        """Set the memory state of the servers.

        Lost servers are ended unless it is ``"everything"``, and restarted only once it is.
        """
        with self._lock:
            self._rests = state != "everything"
        self._loop.run(self.pool.set_memory_state(state))
        with self._lock:
            if self._rests and (lost := self.lost()):
                self._source.end(lost)

    def is_serving(self) -> bool:
        """Return whether there are servers that answer requests."""
        return self._loop.call(lambda: self.pool.serves)

    def mark(self, ranks: Collection[int], state: EngineState) -> None:
        """Let servers serve, or pause them; one that is lost meanwhile stays lost."""

        def mark_all() -> None:
            for rank in ranks:
                if self.pool.report()[_name(rank)].state not in LOST:
                    self.pool.mark(_name(rank), state)

        self._loop.call(mark_all)

    def set_weight_version(self, ranks: Collection[int], version: int) -> None:
        """Tell the clients of servers which weights these were given."""

        def set_all() -> None:
            for rank in ranks:
                self.pool.client(_name(rank)).weight_version = version

        self._loop.call(set_all)

    def distrust(self, reasons: Mapping[int, str]) -> None:
        """Give up servers with wrong weights, each for a reason."""

        def distrust_all() -> None:
            for rank, reason in reasons.items():
                self.pool.mark(_name(rank), "unusable", reason)

        self._loop.call(distrust_all)

    def reports(self) -> list[WorkerReport]:
        """Return and reset the workers' reports."""
        with self._lock:
            return self._source.reports()

    def take_idle(self) -> int:
        """Return how many servers of the policy got no request since the last call.

        Others, such as a judge, are asked by rollout functions, and may have nothing to do.
        """
        return len(self._loop.call(self.pool.take_idle))

    def start_profile(self, directory: Path, ranks: Collection[int]) -> list[str]:
        """Have servers begin a profile in a folder of their own, and return what went wrong.

        :param ranks: Servers to record; none for all.
        """
        self._profiled = {
            _name(plan.rank): directory / f"engine-{plan.rank}"
            for plan in self._plans
            if not ranks or plan.rank in ranks
        }
        return self._loop.run(_start_profile(self.pools.values(), self._profiled))

    def stop_profile(self) -> list[str]:
        """Have the servers that have begun a profile write it, and return what went wrong."""
        profiled, self._profiled = self._profiled, {}
        return self._loop.run(_stop_profile(self.pools.values(), profiled)) if profiled else []

    def take_phases(self) -> dict[Row, Sequence[PhaseTime]]:
        """Return and forget what each server did since the last call."""
        phases = self._loop.call(lambda: {name: pool.take_phases() for name, pool in self.pools.items()})
        return {
            Row("engine", plan.rank): phases[plan.model].get(_name(plan.rank), ()) for plan in self._plans
        }

    def describe(self) -> str:
        """Return how each server is, for an error."""
        return ", ".join(
            f"{_name(rank)} is {report.state} with {sum(load.requests for load in report.loads)} requests"
            for rank, report in self._reports().items()
        )

    def close(self) -> None:
        """Release the servers and restart none any more. The workers end those of the run."""
        with self._lock:
            self._is_closed = True
        self._source.close()
        for pool in self.pools.values():
            self._loop.run(pool.close())


def _name(rank: int) -> str:
    """Return the name of a server in its pool and in errors."""
    return f"engine {rank}"


async def _start_profile(pools: Iterable[EnginePool], directories: Mapping[str, Path]) -> list[str]:
    return [reason for pool in pools for reason in await pool.start_profile(directories)]


async def _stop_profile(pools: Iterable[EnginePool], names: Collection[str]) -> list[str]:
    return [reason for pool in pools for reason in await pool.stop_profile(names)]
