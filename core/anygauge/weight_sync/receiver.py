"""Weight receiver beside a server: keeps its weights, applies deltas and lets the server load them.

It runs in the worker that owns the server, on its node; only changes come over the network.
"""

from __future__ import annotations

import json
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anygauge.weight_sync.buckets import Buffers, cut, dtype_of
from anygauge.weight_sync.changes import Change, apply_change, bytes_view, unframed
from anygauge.weight_sync.checksum import checksum
from anygauge.weight_sync.protocol import RunningUpdate
from anygauge.weight_sync.secret_server import SECRET_HEADER, SecretServer
from anygauge.weight_sync.sharing import shared_memory
from anygauge.weight_sync.transports.tensor import TensorTransport
from anygauge_hooks.errors import RolloutError, WeightMappingError
from anygauge_hooks.weights import WeightPeer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SECRET_HEADER", "Held", "Receiver"]


class Held:
    """The tensors of a version, and the changed ones of an update in progress."""

    def __init__(self) -> None:
        self.version: int | None = None
        """``None`` while an update is on its way, and after one that was given up: they may be mixed."""
        self._tensors: list[tuple[str, Tensor]] = []
        self._changed: set[int] = set()

    def begin(self, base: int | None) -> None:
        """Begin an update.

        :param base: The version that the changes are to; ``None`` if every tensor comes whole.
        :raises RolloutError: The version in memory is not the base.
        """
        if base is None:
            self._tensors = []
        elif self.version is None or self.version != base:
            raise RolloutError(
                f"Version {self.version} is loaded here, but the changes are relative to {base}."
            )
        self.version, self._changed = None, set()

    def apply(self, places: Sequence[tuple[str, Sequence[int], str]], changes: Sequence[Change]) -> None:
        """Apply changes.

        :param places: Name, shape and dtype of tensors that are new here.
        :raises WeightMappingError: A tensor is not what it should be now; it is named.
        """
        import torch

        self._tensors += [
            (name, torch.empty(tuple(shape), dtype=dtype_of(dtype))) for name, shape, dtype in places
        ]
        for change in changes:
            name, tensor = self._tensors[change.tensor]
            try:
                apply_change(change, bytes_view(tensor), tensor.itemsize)
                right = checksum(tensor) == change.checksum
            except (ValueError, IndexError, zlib.error, struct.error) as error:
                raise WeightMappingError(f"The changes of {name} do not fit it: {error}.") from error
            if not right:
                raise WeightMappingError(
                    f"{name} was corrupted: its checksum differs from the sender's.",
                    hint="If it happens again, look for faulty memory or network.",
                )
            self._changed.add(change.tensor)

    def end(self, version: int, *, everything: bool) -> Iterator[tuple[str, Tensor]]:
        """Commit a version, and yield the changed tensors, at least one.

        :param everything: Yield all.
        """
        self.version = version
        numbers = range(len(self._tensors)) if everything else sorted(self._changed) or [self._smallest()]
        yield from (self._tensors[number] for number in numbers)

    def _smallest(self) -> int:
        """Return a tensor that is cheap to load again, where nothing but the version is new."""
        return min(range(len(self._tensors)), key=lambda number: self._tensors[number][1].nbytes)


class Receiver:
    """An HTTP server for one sender. The :class:`WeightPeer` has its address and secret.

    :param peer: The server beside it; :meth:`serve` changes it when that was started again.
    :param host: Address to listen on.
    :param deadline_s: Longest wait for the server to load a bucket, in seconds.
    """

    def __init__(self, peer: WeightPeer, *, host: str, bucket_bytes: int, deadline_s: float) -> None:
        self._peer = peer
        self._bucket_bytes = bucket_bytes
        self._deadline_s = deadline_s
        self._held = Held()
        self._buffers = Buffers(shared_memory)
        self._one = threading.Lock()
        self._server = SecretServer(host, answer=self.answer, stall_s=deadline_s)
        self.address, self.secret = self._server.address, self._server.secret

    def serve(self, peer: WeightPeer) -> None:
        """Set the server to load into."""
        with self._one:
            self._peer = peer

    def answer(self, path: str, data: bytes) -> Mapping[str, Any]:
        """Handle a request.

        :raises AnygaugeError: It cannot be done.
        """
        with self._one:
            if path == "/changes":
                self._held.apply(*unframed(data))
                return {}
            body = json.loads(data)
            if path == "/begin":
                self._held.begin(body["base"])
            elif path == "/load":
                self._load(body["version"], everything=body["everything"], flushes=body["flushes"])
            elif path != "/state":
                raise RolloutError(f"{path} is not a path of a weight receiver.")
            return {"version": self._held.version}

    def _load(self, version: int, *, everything: bool, flushes: bool) -> None:
        """Have the server load what changed, which is paused by who asks."""
        update = RunningUpdate(
            version, [self._peer], {}, pause="none", flushes=flushes, deadline_s=self._deadline_s
        )
        transport = TensorTransport()
        try:
            update.open(session=True)
            tensors = self._held.end(version, everything=everything)
            for bucket in cut(tensors, self._bucket_bytes, self._buffers):
                if update.peers:
                    transport.send(bucket, update)
            update.end(session=True)
            for error in update.errors().values():
                raise error
        finally:
            update.close()

    def close(self) -> None:
        """Stop listening, and release the weights."""
        self._server.close()
        self._buffers.release()
