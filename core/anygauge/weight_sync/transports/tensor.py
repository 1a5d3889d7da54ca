"""Tensor transport for servers on the same host, which map the sender's memory."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from anygauge.weight_sync.buckets import dtype_of
from anygauge.weight_sync.sharing import serialized

if TYPE_CHECKING:
    from anygauge_hooks.weights import WeightBucket, WeightPeer, WeightUpdate

__all__ = ["TensorTransport", "last_words", "tensor_request"]


class TensorTransport:
    """Buckets in shared memory, or in an accelerator's memory with a handle for each server process."""

    stages = False
    opens_session = True

    def connect(self, peers: Sequence[WeightPeer]) -> None:
        """Do nothing: each request says where the memory is."""

    def send(self, bucket: WeightBucket, update: WeightUpdate) -> None:
        """Have the servers load a bucket."""
        update.request(
            "/update_weights_from_tensor",
            lambda peer: tensor_request(bucket, update, processes=peer.tensor_parallel),
            bucket=bucket,
        )

    def wire_bytes(self) -> int | None:
        """Return that all bytes move."""
        return None

    def commit(self, update: WeightUpdate) -> None:
        """Do nothing: the servers have loaded it."""

    def abandon(self) -> None:
        """Do nothing: the next update begins with its first bucket."""

    def close(self) -> None:
        """Do nothing: the buckets' memory is the sender's."""


def tensor_request(bucket: WeightBucket, update: WeightUpdate, *, processes: int) -> dict[str, Any]:
    """Return the body of a request to load a bucket from memory.

    A process takes its own handle of an accelerator's memory, so each gets a payload of its own.
    """
    # The server reads attributes, and unpickles a class of its own or a namespace; only it has the class.
    places = [
        SimpleNamespace(
            name=each.name,
            shape=each.shape,
            dtype=dtype_of(each.dtype),
            start_idx=each.start,
            end_idx=each.end,
            numel=each.end - each.start,
        )
        for each in bucket.tensors
    ]
    value = {"flattened_tensor": bucket.data, "metadata": places}
    return {
        "serialized_named_tensors": [serialized(value) for _ in range(processes)],
        "load_format": "flattened_bucket",
        **last_words(bucket, update),
    }


def last_words(bucket: WeightBucket, update: WeightUpdate) -> dict[str, Any]:
    """Return what the last bucket of an update tells beside its tensors."""
    if not bucket.last:
        return {"flush_cache": False}
    return {"flush_cache": update.flushes, "weight_version": str(update.version)}
