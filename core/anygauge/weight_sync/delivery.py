"""Delivery of one sender's tensors in an update: cut into buckets, sent, counted and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from anygauge.weight_sync.buckets import Buffers, cut, overlapped, unpack
from anygauge.weight_sync.checksum import checksum, digest
from anygauge.weight_sync.parameters import ExpectedParameters, KnownParameters
from anygauge.weight_sync.protocol import started
from anygauge_hooks.errors import RolloutError, WeightMappingError

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge.config.schema import WeightSync
    from anygauge.weight_sync.protocol import RunningUpdate
    from anygauge.weight_sync.report import PeerOutcome
    from anygauge_hooks.weights import WeightBucket, WeightPeer, WeightTransport

__all__ = ["Delivered", "Delivery", "Sender"]

SPARE = 16
"""One part of so many of a bucket is left for a tensor that is being converted: a push that makes no larger
copies takes no more than two buckets."""


class Sender(NamedTuple):
    """Things that a sending process keeps over all updates."""

    options: WeightSync
    transport: WeightTransport
    buffers: Buffers
    outcomes: dict[tuple[str, int], PeerOutcome]
    """Outcome of the last update, by address and incarnation."""
    verified: set[tuple[str, int]]
    """Servers whose parameters were compared since they started."""

    def verifies(self, peers: Sequence[WeightPeer]) -> bool:
        """Return whether an update of these servers is to be verified."""
        if self.options.verify == "first":
            return any(started(peer) not in self.verified for peer in peers)
        return self.options.verify == "always"


class Delivered(NamedTuple):
    """Summary of a sender's delivery. Plain data, for another sender's process."""

    bytes: int
    buckets: int
    tensors: int
    known: KnownParameters | None


class Delivery:
    """The tensors of one sender in an update.

    :param verifies: Whether to compare what arrived with what was gathered.
    """

    def __init__(self, sender: Sender, update: RunningUpdate, *, verifies: bool) -> None:
        self._sender = sender
        self._update = update
        self.is_local = any(peer.is_local for peer in update.peers)
        verifies = verifies and not self.is_local
        tells = any(peer.has_checksums for peer in update.peers)
        self.expected = ExpectedParameters(_dtypes(update.peers)) if verifies and tells else None
        self._digests: dict[str, list[Tensor]] | None = {} if verifies and not tells else None
        """Digests of each tensor as gathered and as copied into its bucket, for servers that report no
        checksums."""
        self.bytes = self.buckets = self.tensors = 0

    @property
    def verifies(self) -> bool:
        """Whether anything is compared."""
        return self.expected is not None or self._digests is not None

    def move(self, weights: Iterator[tuple[str, Tensor]], *, completes: bool = True) -> None:
        """Send the tensors.

        :param completes: Whether the update is complete with them.
        """
        stream = self._noted(weights)
        if not self.is_local:
            size = self._sender.options.bucket_bytes
            buckets = cut(stream, size - size // SPARE, self._sender.buffers, completes=completes)
            overlapped(buckets, self._send)
            return
        self._update.load(lambda target: target.load_tensors(stream, self._update))
        for error in self._update.errors().values():  # this process's own, whole
            raise error

    def compare(self) -> None:
        """Compare what was copied into buckets with what was gathered, for servers without checksums.

        :raises WeightMappingError: A tensor differs.
        """
        if not self._digests:
            return
        pairs = self._digests.values()
        numbers = [torch.stack([pair[side] for pair in pairs]).tolist() for side in (0, 1)]
        for name, gathered, sent in zip(self._digests, *numbers, strict=True):
            if gathered != sent:
                raise self._damaged(name)

    def summary(self) -> Delivered:
        """Return what was delivered."""
        known = None if self.expected is None else self.expected.known
        return Delivered(self.bytes, self.buckets, self.tensors, known)

    def include(self, other: Delivered) -> None:
        """Include what another sender has delivered."""
        self.bytes += other.bytes
        self.buckets += other.buckets
        self.tensors += other.tensors
        if self.expected is not None and other.known is not None:
            self.expected.include(other.known)

    def _noted(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream:
            if self.expected is not None:
                self.expected.add(name, tensor)
            elif self._digests is not None:
                self._digests[name] = [digest(tensor)]
            self.bytes += tensor.nbytes
            self.tensors += 1
            yield name, tensor

    def _send(self, bucket: WeightBucket) -> None:
        self.check_peers()
        self._sender.transport.send(bucket, self._update)
        self._check_sent(bucket)
        self.buckets += 1

    def check_peers(self) -> None:
        """Raise an error if no server is left.

        :raises RolloutError: All have failed.
        """
        if not self._update.peers:
            raise RolloutError(f"No engine is left to receive version {self._update.version}.")

    def _check_sent(self, bucket: WeightBucket) -> None:
        """Check that what lay ready for the servers is what the trainer has, once they have taken it."""
        for name, tensor in unpack(bucket.tensors, bucket.data):
            if self.expected is not None and checksum(tensor) != self.expected.checksums[name]:
                raise self._damaged(name)
            if self._digests is not None:
                self._digests[name].append(digest(tensor))  # compared later: that waits for a device

    def _damaged(self, name: str) -> WeightMappingError:
        return WeightMappingError(
            f"{name} was damaged on its way into a bucket of version {self._update.version}.",
            hint="If it happens again, look for faulty memory on the host of the sending training rank.",
        )


def _dtypes(peers: Sequence[WeightPeer]) -> set[str]:
    return {peer.dtype for peer in peers if peer.dtype is not None}
