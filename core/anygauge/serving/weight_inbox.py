"""Weight updates of an embedded engine in its own process: buckets over HTTP, protected by a secret."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Queue
from typing import TYPE_CHECKING, Any

import numpy as np

from anygauge.weight_sync.buckets import unpack
from anygauge.weight_sync.control import EngineControl
from anygauge.weight_sync.secret_server import SECRET_HEADER, SecretServer
from anygauge.weight_sync.watchdog import describe
from anygauge_hooks.errors import AnygaugeError, RolloutError
from anygauge_hooks.weights import WeightPeer, WeightTarget, WeightTensor

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.engines import RolloutEngine, WeightStream
    from anygauge_hooks.weights import WeightBucket, WeightUpdate

__all__ = ["UpdateAbandonedError", "WeightInbox", "WorkerPeer", "packed"]

PATH = "/weights"


class UpdateAbandonedError(RolloutError):
    """The sender has ended an update before its last bucket."""


class WeightInbox:
    """Takes the buckets of one update at a time, for the engine of this process.

    :param host: Address to listen on.
    :param stall_s: Longest pause within a bucket, in seconds.
    """

    def __init__(self, host: str, *, stall_s: float) -> None:
        self._bodies: Queue[bytes] = Queue()
        self._server = SecretServer(host, answer=self._answer, stall_s=stall_s)
        self.peer = WorkerPeer(address=f"http://{self._server.address}", secret=self._server.secret)
        """The engine as a peer of the sender."""

    def _answer(self, path: str, body: bytes) -> Mapping[str, Any]:
        """Hand a bucket over and wait until the engine has it. An empty body abandons the update."""
        self._bodies.put(body)
        if body:
            self._bodies.join()
        return {}

    def load_into(self, engine: RolloutEngine, version: int) -> None:
        """Have the engine load one update. If the sender abandons it, the sender reports why.

        :raises Exception: The engine's own error, also if the update is abandoned later.
        """
        weights = self.stream()
        with suppress(UpdateAbandonedError):
            try:
                engine.update_weights(weights, version)
            finally:
                with suppress(UpdateAbandonedError):  # which would replace the engine's error
                    for _ in weights:  # the sender waits for every bucket to be taken
                        pass

    def stream(self) -> WeightStream:
        """Yield the tensors of an update to its end, which the sender waits for.

        :raises UpdateAbandonedError: The sender has given it up.
        """
        last = False
        while not last:
            body = self._bodies.get()
            try:
                if not body:
                    raise UpdateAbandonedError("A weight update was given up before its end.")
                tensors, last = _unpacked(body)
                yield from tensors
            finally:
                self._bodies.task_done()

    def close(self) -> None:
        """Stop to listen."""
        self._server.close()


@dataclass(frozen=True, kw_only=True)
class WorkerPeer(WeightPeer):
    """The embedded engine of a rollout worker."""

    @property
    def needs_transport(self) -> bool:
        """Whether its weights travel by a transport of the config."""
        return False

    def target(self, *, deadline_s: float) -> WorkerTarget:
        """Return the inbox as a target of updates."""
        return WorkerTarget(self, deadline_s=deadline_s)


class WorkerTarget(EngineControl, WeightTarget):
    """Client that sends an update to an inbox.

    :param deadline_s: Longest time until the engine has a bucket, in seconds.
    """

    def __init__(self, peer: WorkerPeer, *, deadline_s: float) -> None:
        super().__init__(peer.address, lambda _: {SECRET_HEADER: peer.secret}, deadline_s=deadline_s)
        self._is_open = True

    def load_memory(self, bucket: WeightBucket, update: WeightUpdate) -> None:
        """Send a bucket. Returns once the engine has it."""
        self.post(PATH, packed(bucket), what=describe(bucket, update.version))
        self._is_open = not bucket.last

    def close(self) -> None:
        """Abandon an update that lacks its last bucket, so that the engine stops waiting for it."""
        if self._is_open:
            with suppress(AnygaugeError):  # it has ended
                self.post(PATH, [], what="the end of an update")


def packed(bucket: WeightBucket) -> Sequence[bytes | memoryview]:
    """Return a bucket as bytes: a line of JSON, and the tensors."""
    head = json.dumps({"tensors": bucket.tensors, "last": bucket.last}).encode()
    return [head, b"\n", bucket.data.numpy().data]


def _unpacked(body: bytes) -> tuple[Iterator[tuple[str, Tensor]], bool]:
    """Return the tensors of a bucket, and whether it is the last."""
    import torch

    start = body.index(b"\n") + 1
    head = json.loads(body[:start])
    data = torch.empty(len(body) - start, dtype=torch.uint8)  # where every dtype can be read
    data.numpy()[:] = np.frombuffer(body, np.uint8, offset=start)
    return unpack([WeightTensor(*each) for each in head["tensors"]], data), head["last"]
