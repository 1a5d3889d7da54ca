"""Worker that supervises one server on the server's node."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast
from urllib.parse import urlsplit

from anygauge.config import Config
from anygauge.failures import in_background
from anygauge.observability.memory import worker_memory
from anygauge.observability.performance import WorkerReport
from anygauge.serving.server_plan import plan_servers
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.serving import EngineServer, ServerPeer

if TYPE_CHECKING:
    from anygauge.weight_sync.receiver import Receiver
    from anygauge_hooks.engines import RolloutEngineSpec
    from anygauge_hooks.serving import SupportsEarlyStart

__all__ = ["ServerWorker", "Serving"]

DELTA = "delta"
"""The transport that has a receiver beside each server."""
CLOSING_S = 5.0
"""For a start that was broken off to come to its end."""


class Serving(NamedTuple):
    """A server that runs."""

    peer: ServerPeer
    """How other processes speak to the server."""
    facts: Mapping[str, str]

    @property
    def address(self) -> str:
        """``http://host:port``."""
        return self.peer.address

    @property
    def incarnation(self) -> int:
        """How often it was started again."""
        return self.peer.incarnation


class ServerWorker:
    """Starts a server, starts it again when it is asked to, and ends it."""

    def __init__(self, config: Config, context: WorkerContext) -> None:
        spec: RolloutEngineSpec = context.plugins.get("register_rollout_engines", config.rollout.engine)
        assert spec.serve is not None, "only a server is looked after"
        self._rank = context.rank
        self._plan = plan_servers(config)[context.rank]
        self._encoders: Sequence[str] = ()
        """Addresses of those that it asks."""
        self._device = context.device
        self._server: EngineServer = spec.serve(config, context)
        self._receiver: Receiver | None = None
        """Takes the weights' changes for the server, where only those travel."""
        self._config = config
        self._starts = 0
        self._starting: Future[None] | None = None
        """Restart of the server, while it is in progress."""
        if spec.starts_early and self._plan.wave == 0:
            cast("SupportsEarlyStart", self._server).begin(hold=config.placement.colocated)

    def serve(self, wave: int, encoders: Mapping[str, Sequence[str]]) -> Serving | None:
        """Start the server, if it belongs to this wave of starts.

        :param encoders: Addresses of those that serve already, by model.
        """
        if self._plan.wave != wave:
            return None
        if self._plan.needs_encoders:
            self._encoders = encoders[self._plan.model]
        self._start()
        return self._serving()

    def _start(self) -> None:
        self._server.start(self._encoders)
        self._starts += 1
        if self._config.weight_sync.transport == DELTA:
            self._receive(self._peer())

    def _receive(self, peer: ServerPeer) -> None:
        """Have changes of weights loaded into this server from now on."""
        if self._receiver is not None:
            self._receiver.serve(peer)
            return
        from anygauge.weight_sync.receiver import Receiver

        options, host = self._config.weight_sync, urlsplit(peer.address).hostname
        assert host is not None, peer.address
        self._receiver = Receiver(
            peer, host=host, bucket_bytes=options.bucket_bytes, deadline_s=options.deadline_s
        )

    def look(self, lost: Mapping[int, int]) -> Serving | None:
        """Return the server; ``None`` while it is being restarted in the background.

        It is started again if it has ended, or is one of those that are named.

        :param lost: Incarnations of servers that cannot be used, by rank.
        """
        if self._starting is None and self._is_lost(lost.get(self._rank)):
            self._starting = in_background(self._start_again, "start of a server")
        if self._starting is not None:
            if not self._starting.done():
                return None
            self._starting.result()
            self._starting = None
        return self._serving()

    def _is_lost(self, incarnation: int | None) -> bool:
        return incarnation == self._starts - 1 or not self._server.is_alive()

    def _start_again(self) -> None:
        self._server.close()
        self._start()

    def end(self, ranks: Collection[int]) -> None:
        """End the server, or its start, if it is among the named ones, to free its memory."""
        if self._rank in ranks:
            self._end()
            self._starting = None

    def report(self) -> WorkerReport:
        """Return the memory in use, in bytes, without the server's."""
        return {"seconds": {}, "memory": worker_memory(self._device)}

    def close(self) -> None:
        """End the server."""
        if self._receiver is not None:
            self._receiver.close()
        self._end()

    def _end(self) -> None:
        self._server.close()
        if self._starting is not None:  # ended above; unless it was only about to be
            futures.wait([self._starting], CLOSING_S)
            self._server.close()

    def _serving(self) -> Serving:
        return Serving(self._peer(), self._server.facts())

    def _peer(self) -> ServerPeer:
        """Return the server as those that send weights know it."""
        peer = replace(self._server.peer(), dtype=self._config.rollout.dtype, incarnation=self._starts - 1)
        if (receiver := self._receiver) is None:
            return peer
        return replace(peer, receiver=receiver.address, secret=receiver.secret)
