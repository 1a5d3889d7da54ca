"""Served rollout engines: a worker on each server's node supervises it.

The driver's event loop speaks to them over HTTP. New weights do not pass through the driver: the first
training rank sends them. A server that has ended, or no longer answers, is started again at once; it gets
the weights of the others when the driver's own thread next waits for samples or syncs, since then no training
is under way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from anygauge.config import Config
from anygauge.config.schema import POLICY
from anygauge.observability.performance import WorkerReport
from anygauge.plugins import Plugins
from anygauge.runtime.event_loop import EventLoop
from anygauge.runtime.media_stores import open_store
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.serving.generation_client import GenerationClient
from anygauge.serving.server_sources import AttachedServers, ServerSource, StartedServers
from anygauge.serving.servers import Servers
from anygauge_hooks.engines import RolloutEngineSpec
from anygauge_hooks.errors import DeadlineError

if TYPE_CHECKING:
    from anygauge.weight_sync.report import SyncReport
    from anygauge_hooks.weights import WeightPeer

__all__ = ["ServedEngines", "devices_of_server", "open_servers", "push_weights"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
SHOWN = 3
"""Names in a message."""
WATCH_S = 0.2
"""Interval of checks whether a server has ended."""


class ServedEngines:
    """The servers of a run, whose weights are those of the workers that train.

    :param trainers: ``None`` where nothing is trained.
    :param sender: From a server to the training rank that sends it the weights.
    """

    def __init__(
        self,
        config: Config,
        servers: Servers,
        trainers: WorkerGroup | None,
        loop: EventLoop,
        *,
        sender: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self._config = config
        self._servers = servers
        self._trainers = trainers
        self._loop = loop
        self._sender = sender
        self._version = 0
        self._seconds = 0.0
        self._unverified: Sequence[str] = ()
        """Parameters that nothing could be compared with, as was last said."""

    def generation_client(self) -> AbstractContextManager[GenerationClient]:
        """Return how requests get to the servers."""
        pools = self._servers.pools
        others = {model: pool for model, pool in pools.items() if model != POLICY}
        pause = None if self._keeps_requests() else self._pause
        return nullcontext(GenerationClient(pools[POLICY], self._loop, self.wait, others, pause=pause))

    def _keeps_requests(self) -> bool:
        peers = [self._servers.serving[rank].peer for rank in self._servers.synced]
        return self._config.weight_sync.pause != "abort" and all(peer.keeps_requests for peer in peers)

    def _pause(self) -> None:
        """Keep new requests in the queue until the next update, and end those that are there already."""
        self._servers.mark(sorted(self._servers.synced), "paused")
        self._loop.run(self._servers.pools[POLICY].abort_waiting())

    def wait(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """Run a coroutine in the event loop; restart servers that are lost meanwhile.

        :param what: Is waited for; for the error.
        :raises DeadlineError: It is not there within ``run.timeout_s``.
        :raises RolloutError: A server ends again and again.
        """
        started = time.perf_counter()
        future = self._loop.start(coroutine)
        try:
            while not future.done():
                futures.wait([future], WATCH_S)
                self._repair()
                if time.perf_counter() - started > self._config.run.timeout_s:
                    raise self._late(what)
            result = future.result()
        finally:
            future.cancel()
            self._seconds += time.perf_counter() - started
        self._servers.prove()
        return result

    def trained(self, version: int) -> None:
        """Learn that the workers that train have a version now: servers that are up again get that one."""
        self._version = version

    def sync(self, version: int) -> None:
        """Give the trained weights to every server.

        One that does not come out of it with the new version is started again, and gets it later.
        """
        self._version = version
        self._servers.look()
        lost = self._servers.lost()
        self._push(sorted(self._servers.synced - lost.keys()))
        self._servers.look()

    def start_profile(self, kind: str, directory: Path, ranks: Collection[int]) -> Sequence[str | None]:
        """Have the servers begin a profile, if the kind is theirs."""
        if kind != self._config.rollout.engine:
            return ()
        return self._servers.start_profile(directory, ranks)

    def stop_profile(self) -> Sequence[str | None]:
        """Have the servers write their profiles, if they have begun any."""
        return self._servers.stop_profile()

    def reports(self) -> Sequence[WorkerReport]:
        """Return and reset the reports of the servers' workers, and the time spent waiting for samples."""
        seconds, self._seconds = self._seconds, 0.0
        own: WorkerReport = {
            "seconds": {"generate": seconds},
            "memory": {},
            "servers": {"idle": self._servers.take_idle()},
            "phases": self._servers.take_phases(),
        }
        return [*self._servers.reports(), own]

    def _repair(self) -> None:
        """Take servers back that were started again, with the weights that the others have."""
        self._servers.look()
        if self._servers.behind:
            self._push(sorted(self._servers.behind))

    def _push(self, ranks: Sequence[int]) -> None:
        """Send the weights of the training workers to some servers, which get no request meanwhile."""
        self._servers.behind.difference_update(ranks)
        if self._trainers is None or (not self._version and self._servers.has_first_weights):
            self._servers.mark(ranks, "serving")
            return
        self._give(self._trainers, ranks)

    def _give(self, trainers: WorkerGroup, ranks: Sequence[int]) -> None:
        """Have the training workers send their weights to some servers; those that refuse are given up."""
        if not ranks:
            return
        self._servers.mark(ranks, "paused")
        refused = self._send(trainers, ranks)
        if refused and len(ranks) > 1:  # one that fails may have taken others with it
            refused = {rank: why for each in refused for rank, why in self._send(trainers, [each]).items()}
        asked = set(ranks) - self._servers.behind  # one that is behind has come back meanwhile
        self._servers.distrust({rank: refused[rank] for rank in asked & refused.keys()})
        self._servers.set_weight_version(asked - refused.keys(), self._version)
        self._servers.mark(asked - refused.keys(), "serving")

    def _send(self, trainers: WorkerGroup, ranks: Sequence[int]) -> dict[int, str]:
        """Send the weights to paused servers, and return which did not take them, and why."""
        peers = [self._servers.serving[rank].peer for rank in ranks]
        senders = [self._sender(rank) for rank in ranks]
        reports = push_weights(trainers, self._version, peers, senders)
        refused = {each.address: each.error or "" for report in reports for each in report.failed}
        unverified = tuple(dict.fromkeys(name for report in reports for name in report.unverified))
        if unverified and unverified != self._unverified:
            some = ", ".join(unverified[:SHOWN])
            _log.warning("%d parameters of engines were not verified: %s", len(unverified), some)
            self._unverified = unverified
        addressed = zip(ranks, peers, strict=True)
        return {rank: refused[peer.address] for rank, peer in addressed if peer.address in refused}

    def _late(self, what: str) -> DeadlineError:
        return DeadlineError(
            f"Waited {self._config.run.timeout_s:g} s for {what}. The engines: {self._servers.describe()}.",
            hint="Raise run.timeout_s if it may take longer; the engines' logs are in the run directory.",
        )


def push_weights(
    trainers: WorkerGroup, version: int, peers: Sequence[WeightPeer] = (), senders: Sequence[int] = ()
) -> Sequence[SyncReport]:
    """Have the training workers give their weights to rollout engines, and return how each came out of it.

    :param peers: Engines elsewhere than in the training workers.
    :param senders: The training rank that sends to each of them.
    """
    answers = trainers.call("push_weights", version=version, peers=peers, senders=senders)
    reports: list[SyncReport] = [report for report in answers if report is not None]
    for failed in (peer for report in reports for peer in report.failed):
        _log.warning("%s did not take weight version %d: %s", failed.address, version, failed.error)
    return reports


@contextmanager
def open_servers(
    config: Config,
    plugins: Plugins,
    workers: WorkerGroup | None,
    trainers: WorkerGroup | None,
    directory: Path,
    make: Callable[..., ServedEngines] = ServedEngines,
) -> Iterator[ServedEngines]:
    """Wait until the servers of a run answer, and close their clients after.

    :param workers: Those that look after the servers, and end them; ``None`` for external servers.
    :param trainers: The workers that train, if any do.
    :param directory: Directory of the run.
    :param make: Makes the engines of these servers.
    """
    source = StartedServers(config, workers) if workers else _attached(config, plugins)
    with (
        EventLoop() as loop,
        closing(Servers(config, source, loop, open_store(config, directory.resolve()))) as servers,
    ):
        yield make(config, servers, trainers, loop)


def _attached(config: Config, plugins: Plugins) -> ServerSource:
    return AttachedServers(config, plugins.get("register_rollout_engines", config.rollout.engine))


def devices_of_server(config: Config, plugins: Plugins) -> int:
    """Return how many devices each server takes."""
    spec: RolloutEngineSpec = plugins.get("register_rollout_engines", config.rollout.engine)
    return 1 if spec.devices is None else spec.devices(config)
