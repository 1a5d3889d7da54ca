"""Tensor transport for servers on the same host, which map the sender's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anygauge_hooks.weights import WeightBucket, WeightPeer, WeightUpdate

__all__ = ["TensorTransport"]


class TensorTransport:
    """Buckets in shared memory, or in an accelerator's memory with a handle for each server process."""

    stages = False
    opens_session = True

    def connect(self, peers: Sequence[WeightPeer]) -> None:
        """Do nothing: each request says where the memory is."""

    def send(self, bucket: WeightBucket, update: WeightUpdate) -> None:
        """Have the servers load a bucket."""
        update.load(lambda target: target.load_memory(bucket, update))

    def wire_bytes(self) -> int | None:
        """Return that all bytes move."""
        return None

    def commit(self, update: WeightUpdate) -> None:
        """Do nothing: the servers have loaded it."""

    def abandon(self) -> None:
        """Do nothing: the next update begins with its first bucket."""

    def close(self) -> None:
        """Do nothing: the buckets' memory is the sender's."""
