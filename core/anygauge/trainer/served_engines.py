"""Rollout engines that are servers, each looked after by a worker on its node.

The driver's event loop speaks to them over HTTP. New weights do not pass through the driver: the first
training rank sends them. A server that has ended, or no longer answers, is started again and given the
weights of the others by the driver's own thread, while it waits for samples: then no training is under way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from anygauge.config import Config
from anygauge.plugins import Plugins
from anygauge.rollout.fleet import EngineState, Fleet
from anygauge.trainer.event_loop import EventLoop
from anygauge.trainer.launch import launch_workers
from anygauge.trainer.requests import Requests
from anygauge.trainer.server_workers import Serving
from anygauge.trainer.worker_group import WorkerGroup
from anygauge_hooks.engines import RolloutEngineSpec
from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.types import BackendSpec

if TYPE_CHECKING:
    from anygauge.weight_sync.report import SyncReport

__all__ = ["ServedEngines", "open_servers"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
SERVER = "anygauge.trainer.server_workers:ServerWorker"
WATCH_S = 0.2
"""Between looks at whether a server has ended."""
RESTARTS = 3
"""Of a server between two answers that were waited for; one that ends more often ends the run."""


class ServedEngines:
    """The servers of a run.

    :param servers: The workers that look after them, one each.
    :param trainers: ``None`` where nothing is trained.
    """

    generate = None

    def __init__(
        self, config: Config, servers: WorkerGroup, trainers: WorkerGroup | None, loop: EventLoop
    ) -> None:
        self._config = config
        self._servers = servers
        self._trainers = trainers
        self._version = 0
        self._serving: list[Serving] = servers.call("serve", timeout_s=config.placement.start_timeout_s)
        self._restarts = [0] * len(self._serving)
        self._seconds = 0.0
        self.loop = loop
        self.fleet = loop.run(_made(config, self._serving))

    def requests(self) -> AbstractContextManager[Requests]:
        """Return how requests get to the servers."""
        return nullcontext(Requests(self.fleet, self.loop, self.wait))

    def wait(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """Return what a coroutine in the event loop returns; see to servers that are lost meanwhile.

        :param what: Is waited for; for the error.
        :raises DeadlineError: It is not there within ``run.timeout_s``.
        :raises RolloutError: A server ends again and again.
        """
        started = time.perf_counter()
        future = self.loop.start(coroutine)
        try:
            while not future.done():
                futures.wait([future], WATCH_S)
                self.repair()
                if time.perf_counter() - started > self._config.run.timeout_s:
                    raise self._late(what)
            found = future.result()
        finally:
            future.cancel()
            self._seconds += time.perf_counter() - started
        self._restarts = [0] * len(self._serving)
        return found

    def sync(self, version: int) -> None:
        """Give the trained weights to every server.

        One that does not come out of it with the new version is started again.
        """
        self._version = version
        self.repair()
        self._push(range(len(self._serving)))
        self.repair()

    def reports(self) -> Sequence[Mapping[str, Any]]:
        """Return and reset what each server's worker reports, and how long samples were waited for."""
        reports: list[Mapping[str, Any]] = self._servers.call("report")
        seconds, self._seconds = self._seconds, 0.0
        return [*reports, {"seconds": {"generate": seconds}, "memory": {}}]

    def repair(self) -> None:
        """Start lost servers again, and give them the weights that the others have."""
        while lost := self.loop.run(_lost(self.fleet)):
            for rank, reason in lost.items():
                self._count_restart(rank, reason)
            _log.warning("starting again: %s", "; ".join(lost.values()))
            started = self._restart(lost)
            self.loop.run(_replace(self.fleet, started))
            if self._version:
                self._push(sorted(started))
            else:
                self.loop.run(_mark(self.fleet, started, "serving"))

    def _restart(self, lost: Collection[int]) -> dict[int, Serving]:
        """Return the servers that were started again: those that are lost, and others that have ended."""
        limit_s = self._config.placement.start_timeout_s
        before = self._serving
        self._serving = self._servers.call("restart", ranks=sorted(lost), timeout_s=limit_s)
        pairs = enumerate(zip(before, self._serving, strict=True))
        return {rank: now for rank, (then, now) in pairs if now.incarnation != then.incarnation}

    def _count_restart(self, rank: int, reason: str) -> None:
        self._restarts[rank] += 1
        if self._restarts[rank] > RESTARTS:
            raise RolloutError(
                f"Rollout engine {rank} was lost again after {RESTARTS} restarts: {reason}",
                hint="Look into its log in the run directory, logs/rollout-*.",
            )

    def _push(self, ranks: Sequence[int]) -> None:
        """Send the weights of the training workers to some servers, which get no request meanwhile."""
        if self._trainers is None:
            self.loop.run(_mark(self.fleet, ranks, "serving"))
            return
        self.loop.run(_mark(self.fleet, ranks, "paused"))
        peers = [self._serving[rank].peer for rank in ranks]
        report: SyncReport = self._trainers.call("push_weights", version=self._version, peers=peers)[0]
        refused = {
            rank: outcome.error or "it kept the version before"
            for rank, outcome in zip(ranks, report.peers, strict=True)
            if outcome.version != self._version
        }
        for rank, error in refused.items():
            _log.warning("engine %d did not take weight version %d: %s", rank, self._version, error)
        self.loop.run(_distrust(self.fleet, refused))
        self.loop.run(_mark(self.fleet, set(ranks) - refused.keys(), "serving"))

    def _late(self, what: str) -> DeadlineError:
        states = self.loop.run(_states(self.fleet))
        return DeadlineError(
            f"Waited {self._config.run.timeout_s:g} s for {what}. The engines: {states}.",
            hint="Raise run.timeout_s if it may take longer; the engines' logs are in the run directory.",
        )


@contextmanager
def open_servers(
    config: Config,
    backend: BackendSpec,
    plugins: Plugins,
    trainers: WorkerGroup | None,
    directory: Path,
) -> Iterator[ServedEngines]:
    """Start the servers of a run, and end them after.

    :param trainers: The workers that train, if any do.
    :param directory: Of the run.
    """
    with (
        launch_workers(
            config,
            backend,
            plugins,
            worker_class=SERVER,
            role="rollout",
            run_directory=directory,
            num_workers=config.placement.rollout_workers,
            collective=False,
            first_device=config.placement.num_workers,
            devices=devices_of_server(config, plugins),
        ) as servers,
        EventLoop() as loop,
    ):
        engines = ServedEngines(config, servers, trainers, loop)
        yield engines
        loop.run(engines.fleet.close())


def devices_of_server(config: Config, plugins: Plugins) -> int:
    """Return how many devices each server takes."""
    spec: RolloutEngineSpec = plugins.get("register_rollout_engines", config.rollout.engine)
    return 1 if spec.devices is None else spec.devices(config)


def _name(rank: int) -> str:
    """Return how the fleet and its errors call a server."""
    return f"engine {rank}"


async def _made(config: Config, serving: Sequence[Serving]) -> Fleet:
    fleet = Fleet(config.rollout.client)
    for rank, server in enumerate(serving):
        fleet.add(_name(rank), server.address)
    return fleet


async def _lost(fleet: Fleet) -> dict[int, str]:
    """Return which servers cannot be used, and why."""
    reports = enumerate(fleet.report().values())
    return {rank: report.reason for rank, report in reports if report.state in ("unusable", "dead")}


async def _replace(fleet: Fleet, serving: Mapping[int, Serving]) -> None:
    """Let the fleet know servers that were started again, which get nothing yet."""
    for rank, server in serving.items():
        fleet.add(_name(rank), server.address, state="paused")


async def _mark(fleet: Fleet, ranks: Iterable[int], state: EngineState) -> None:
    """Let servers serve, or pause them; one that is lost meanwhile stays lost."""
    for rank in ranks:
        if fleet.report()[_name(rank)].state in ("serving", "paused"):
            fleet.mark(_name(rank), state)


async def _distrust(fleet: Fleet, reasons: Mapping[int, str]) -> None:
    for rank, reason in reasons.items():
        fleet.mark(_name(rank), "unusable", reason)


async def _states(fleet: Fleet) -> str:
    return ", ".join(
        f"{name} is {report.state} with {sum(load.requests for load in report.loads)} requests"
        for name, report in fleet.report().items()
    )
