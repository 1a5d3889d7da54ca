"""What runs in a process that looks after one server, on the server's node."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from anygauge.config import Config
from anygauge.observability.memory import worker_memory
from anygauge.observability.performance import WorkerReport
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.rollout import EngineServer
from anygauge_hooks.weights import WeightPeer

if TYPE_CHECKING:
    from anygauge.weight_sync.receiver import Receiver
    from anygauge_hooks.engines import RolloutEngineSpec

__all__ = ["ServerWorker", "Serving"]

DELTA = "delta"
"""The transport that has a receiver beside each server."""


class Serving(NamedTuple):
    """A server that runs."""

    peer: WeightPeer
    """Where it is found, and how it takes weights."""
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
        visible = context.backend.visible_devices_env
        if visible is not None and context.accelerators:
            os.environ[visible] = ",".join(context.accelerators)  # the server sees its own devices alone
        self._rank = context.rank
        self._device = context.device
        self._server: EngineServer = spec.serve(config, context)
        self._receiver: Receiver | None = None
        """Takes the weights' changes for the server, where only those travel."""
        self._config = config
        self._starts = 0

    def serve(self) -> Serving:
        """Start the server."""
        self._server.start()
        self._starts += 1
        if self._config.weight_sync.transport == DELTA:
            self._receive(self._peer())
        return self._serving()

    def _receive(self, peer: WeightPeer) -> None:
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

    def restart(self, ranks: Collection[int]) -> Serving:
        """Start the server again, if it has ended or is one of those that are named, and say where it is."""
        if self._rank in ranks or not self._server.is_alive():
            self._server.close()
            return self.serve()
        return self._serving()

    def report(self) -> WorkerReport:
        """Return the memory in use, in bytes; what a server spends is its own."""
        return {"seconds": {}, "memory": worker_memory(self._device)}

    def close(self) -> None:
        """End the server."""
        if self._receiver is not None:
            self._receiver.close()
        self._server.close()

    def _serving(self) -> Serving:
        return Serving(self._peer(), self._server.facts())

    def _peer(self) -> WeightPeer:
        """Return the server as those that send weights know it."""
        peer = replace(
            self._server.weight_peer(), dtype=self._config.rollout.dtype, incarnation=self._starts - 1
        )
        if (beside := self._receiver) is None:
            return peer
        return replace(peer, receiver=beside.address, secret=beside.secret)
