"""Sources of a run's servers: started by its workers, or already running elsewhere."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Protocol

from anygauge.config import Config
from anygauge.failures import in_background
from anygauge.observability.performance import WorkerReport
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.serving.server_plan import plan_servers
from anygauge.serving.server_workers import Serving
from anygauge_hooks.engines import RolloutEngineSpec
from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.serving import EngineAwayError, EngineServer

__all__ = ["AttachedServers", "ServerSource", "StartedServers"]

_log = logging.getLogger(__name__)
RETURN_S = 1.0
"""Interval of checks whether a lost external server is back."""


class ServerSource(Protocol):
    """Servers by rank, as :func:`anygauge.serving.server_plan.plan_servers` has them."""

    has_first_weights: bool
    """Whether servers come with the weights of version 0."""

    def serve(self) -> list[Serving]:
        """Return every server, once it serves."""

    def look(self, lost: Mapping[int, int]) -> list[Serving | None]:
        """Return every server; ``None`` for one that is still being restarted in the background.

        :param lost: Incarnations of those that cannot be used, by rank.
        """

    def end(self, ranks: Collection[int]) -> None:
        """End lost servers, so that they free the memory of their devices."""

    def reports(self) -> list[WorkerReport]:
        """Return and reset the reports of the server workers."""

    def close(self) -> None:
        """Stop watching the servers."""


class StartedServers:
    """Servers of the run's own, those of one wave after those of the wave before.

    :param workers: Those that look after them, one each, which end them too.
    """

    def __init__(self, config: Config, workers: WorkerGroup) -> None:
        # They load model.path, without the adapter or the 4-bit base that training may start from.
        self.has_first_weights = not config.starts_elsewhere
        self._plans = plan_servers(config)
        self._start_s = config.placement.start_timeout_s
        self._workers = workers

    def serve(self) -> list[Serving]:
        """Start every server."""
        serving: dict[int, Serving] = {}
        for wave in sorted({plan.wave for plan in self._plans}):
            encoders = self._encoders(serving)
            servers = self._workers.call("serve", timeout_s=self._start_s, wave=wave, encoders=encoders)
            serving |= {rank: server for rank, server in enumerate(servers) if server is not None}
        return [serving[rank] for rank in range(len(serving))]

    def _encoders(self, serving: Mapping[int, Serving]) -> Mapping[str, Sequence[str]]:
        """Return the addresses of the encoders that serve, by model."""
        encoders: defaultdict[str, list[str]] = defaultdict(list)
        for rank, server in serving.items():
            if self._plans[rank].kind == "encoder":
                encoders[self._plans[rank].model].append(server.address)
        return dict(encoders)

    def look(self, lost: Mapping[int, int]) -> list[Serving | None]:
        """Have lost servers started again."""
        servers: list[Serving | None] = self._workers.call("look", lost=dict(lost))
        return servers

    def end(self, ranks: Collection[int]) -> None:
        """Let the workers of lost servers end them."""
        self._workers.call("end", ranks=sorted(ranks))

    def reports(self) -> list[WorkerReport]:
        """Return and reset the workers' reports."""
        reports: list[WorkerReport] = self._workers.call("report")
        return reports

    def close(self) -> None:
        """Do nothing: the workers end the servers."""


class AttachedServers:
    """Servers that somebody else has started, and may start again.

    :param spec: Spec of the engine that the servers are.
    """

    has_first_weights = False

    def __init__(self, config: Config, spec: RolloutEngineSpec) -> None:
        assert spec.attach is not None, "the config was checked"
        self._servers: list[EngineServer] = [spec.attach(config, each) for each in config.rollout.external]
        self._dtype = config.rollout.dtype
        self._start_s = config.placement.start_timeout_s
        self._incarnations = [0] * len(self._servers)
        self._returning: dict[int, Future[None]] = {}
        self._closed = threading.Event()

    def serve(self) -> list[Serving]:
        """Check every server; wait for one that is being started.

        :raises RolloutError: One does not answer in time, or is not what the run needs.
        """
        ends = time.monotonic() + self._start_s
        for server in self._servers:
            while not _is_there(server, ends):
                self._closed.wait(RETURN_S)
        return [self._serving(rank) for rank in range(len(self._servers))]

    def look(self, lost: Mapping[int, int]) -> list[Serving | None]:
        """Wait in the background for the return of lost servers."""
        for rank, incarnation in lost.items():
            if rank not in self._returning and incarnation == self._incarnations[rank]:
                self._returning[rank] = in_background(partial(self._await_return, rank), "start of a server")
        return [self._returned(rank) for rank in range(len(self._servers))]

    def _returned(self, rank: int) -> Serving | None:
        if (returning := self._returning.get(rank)) is not None:
            if not returning.done():
                return None
            returning.result()
            del self._returning[rank]
            self._incarnations[rank] += 1
        return self._serving(rank)

    def _await_return(self, rank: int) -> None:
        last_error = ""
        while not self._closed.wait(RETURN_S):
            try:
                self._servers[rank].start()
            except (RolloutError, DeadlineError) as error:
                if str(error) != last_error:
                    _log.warning("engine %d is not back: %s", rank, error)
                last_error = str(error)
            else:
                return

    def _serving(self, rank: int) -> Serving:
        server = self._servers[rank]
        peer = replace(server.peer(), dtype=self._dtype, incarnation=self._incarnations[rank])
        return Serving(peer, server.facts())

    def end(self, ranks: Collection[int]) -> None:
        """Do nothing: the run did not start them."""

    def reports(self) -> list[WorkerReport]:
        """Return nothing: external servers have no workers."""
        return []

    def close(self) -> None:
        """Let go of the servers, which go on."""
        self._closed.set()
        for server in self._servers:
            server.close()


def _is_there(server: EngineServer, ends: float) -> bool:
    """Return whether a server could be attached to; raise why not once it is too late."""
    try:
        server.start()
    except EngineAwayError as error:
        if time.monotonic() < ends:
            return False
        raise RolloutError(
            f"An engine of rollout.external does not answer: {error.args[0]}",
            hint="Start it, or correct its address; placement.start_timeout_s is how long it is waited for.",
        ) from error
    return True
