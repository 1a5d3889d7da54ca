"""Weight pusher: sends a training worker's weights to rollout engines, in complete versions."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from anygauge.weight_sync.buckets import Buffers, cut, overlapped, unpack
from anygauge.weight_sync.checksum import checksum, digest
from anygauge.weight_sync.parameters import ExpectedParameters
from anygauge.weight_sync.protocol import RunningUpdate, started
from anygauge.weight_sync.report import PeerOutcome, SyncReport
from anygauge.weight_sync.sharing import shared_memory
from anygauge.weight_sync.transports.tensor import TensorTransport
from anygauge_hooks.errors import RolloutError, WeightMappingError

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge.config import Config
    from anygauge.config.schema import WeightSync
    from anygauge_hooks.engines import WorkerContext
    from anygauge_hooks.types import Device
    from anygauge_hooks.weights import WeightBucket, WeightPeer, WeightTransport, WeightTransportSpec

__all__ = ["WeightPusher", "make_pusher"]

Weights = Iterable[tuple[str, "Tensor"]]
SPARE = 16
"""One part of so many of a bucket is left for a tensor that is being converted: a push that makes no larger
copies takes no more than two buckets."""


class WeightPusher:
    """The sender of a run. One update at a time, from one thread.

    :param options: The config's ``[weight_sync]``.
    :param buffers: Memory for the buckets.
    """

    def __init__(self, options: WeightSync, transport: WeightTransport, buffers: Buffers) -> None:
        self._options = options
        self._transport = transport
        self._buffers = buffers
        self._outcomes: dict[tuple[str, int], PeerOutcome] = {}
        self._verified: set[tuple[str, int]] = set()
        """Servers whose parameters were compared since they started."""

    def push(
        self, weights: Weights, version: int, peers: Sequence[WeightPeer], *, pauses: bool = True
    ) -> SyncReport:
        """Send a version to the servers and return the outcome of each.

        The weights are iterated to their end whatever happens: the other ranks do, and gathering them is a
        collective. A server that refuses or fails is left out; see :class:`PeerOutcome` for what it is then.

        :param weights: Full tensors under Hugging Face names.
        :param pauses: Whether to pause the servers and to let them go on; else the caller does.
        :raises RolloutError: The servers cannot be reached by this transport; nothing was sent.
        """
        # A plain iterator: what is left of it is gathered and dropped, whoever stopped asking.
        stream = iter(weights)
        try:
            return _Push(self, version, peers, pauses=pauses).run(stream)
        finally:
            for _ in stream:
                pass

    def release_buffers(self) -> None:
        """Release the buffers' memory until the next update."""
        self._buffers.release()

    def close(self) -> None:
        """Release the transport and the buffers."""
        self._transport.close()
        self._buffers.release()

    def _verifies(self, peers: Sequence[WeightPeer]) -> bool:
        if self._options.verify == "first":
            return any(started(peer) not in self._verified for peer in peers)
        return self._options.verify == "always"


class _Push:
    """One update."""

    def __init__(
        self, pusher: WeightPusher, version: int, peers: Sequence[WeightPeer], *, pauses: bool
    ) -> None:
        self._pusher = pusher
        self._options = pusher._options
        self._transport = pusher._transport
        self._version = version
        self._all = tuple(peers)
        self._update = RunningUpdate(
            version,
            peers,
            pusher._outcomes,
            pause=self._options.pause if pauses else "none",
            flushes=self._options.pause != "in_place",
            deadline_s=self._options.deadline_s,
        )
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._is_local = any(peer.is_local for peer in peers)
        verifies = not self._is_local and pusher._verifies(peers)
        tells = any(peer.has_checksums for peer in peers)
        self._expected = ExpectedParameters(_dtypes(peers)) if verifies and tells else None
        self._digests: dict[str, list[Tensor]] | None = {} if verifies and not tells else None
        """Digests of each tensor as gathered and as copied into its bucket, for servers that report no
        checksums."""
        self._sent = [0, 0, 0]
        """Bytes, buckets, tensors."""

    def run(self, stream: Iterator[tuple[str, Tensor]]) -> SyncReport:
        started = time.perf_counter()
        try:
            self._deliver(stream)
        except BaseException as error:  # foreign code: transports and engines
            self._transport.abandon()
            self._update.give_up(error)
            self._remember()
            reported = isinstance(error, RolloutError | TimeoutError | OSError | WeightMappingError)
            if self._is_local or not reported:
                raise
        else:
            with self._timed("resume"):
                self._update.accept()
            if self._update.errors():
                self._transport.abandon()
            self._remember()
        finally:
            self._update.close()
        self._seconds["total"] = time.perf_counter() - started
        return self._report()

    def _deliver(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        transport = self._transport
        with self._timed("connect"):
            transport.connect(self._all)
        if not transport.stages:
            self._open()
        with self._timed("move"):
            self._move(self._noted(stream))
        if transport.stages:
            self._open()
        with self._timed("load"):
            transport.commit(self._update)
        if self._digests:
            with self._timed("verify"):
                self._compare_digests(self._digests)
        with self._timed("end"):
            self._update.end(session=transport.opens_session)
        if self._expected is not None:
            with self._timed("verify"):
                self._update.verify(self._expected.differences)

    def _move(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        if not self._is_local:
            room = self._options.bucket_bytes - self._options.bucket_bytes // SPARE
            overlapped(cut(stream, room, self._pusher._buffers), self._send)
            return
        self._update.load(lambda target: target.load_tensors(stream, self._update))
        for error in self._update.errors().values():  # this process's own, whole
            raise error

    def _open(self) -> None:
        with self._timed("begin"):
            self._update.open(session=self._transport.opens_session)
        self._someone_left()

    def _noted(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream:
            if self._expected is not None:
                self._expected.add(name, tensor)
            elif self._digests is not None:
                self._digests[name] = [digest(tensor)]
            self._sent[0] += tensor.nbytes
            self._sent[2] += 1
            yield name, tensor

    def _send(self, bucket: WeightBucket) -> None:
        self._someone_left()
        self._transport.send(bucket, self._update)
        self._check_sent(bucket)
        self._sent[1] += 1

    def _check_sent(self, bucket: WeightBucket) -> None:
        """Check that what lay ready for the servers is what the trainer has, once they have taken it."""
        for name, tensor in unpack(bucket.tensors, bucket.data):
            if self._expected is not None and checksum(tensor) != self._expected.checksums[name]:
                raise self._damaged(name)
            if self._digests is not None:
                self._digests[name].append(digest(tensor))  # compared later: that waits for a device

    def _compare_digests(self, digests: Mapping[str, Sequence[Tensor]]) -> None:
        numbers = [torch.stack([pair[side] for pair in digests.values()]).tolist() for side in (0, 1)]
        for name, gathered, sent in zip(digests, *numbers, strict=True):
            if gathered != sent:
                raise self._damaged(name)

    def _damaged(self, name: str) -> WeightMappingError:
        return WeightMappingError(
            f"{name} was damaged on its way into a bucket of version {self._version}.",
            hint="If it happens again, look for faulty memory on the host of training rank 0.",
        )

    def _someone_left(self) -> None:
        if not self._update.peers:
            raise RolloutError(f"No engine is left to receive version {self._version}.")

    def _remember(self) -> None:
        for peer, outcome in zip(self._all, self._update.outcomes(), strict=True):
            self._pusher._outcomes[started(peer)] = outcome
            verified = self._expected is not None or self._digests is not None
            if verified and outcome.version == self._version:
                self._pusher._verified.add(started(peer))

    def _report(self) -> SyncReport:
        size, buckets, tensors = self._sent
        moved = self._transport.wire_bytes()
        return SyncReport(
            version=self._version,
            transport=self._options.transport,
            bytes=size,
            wire_bytes=size if moved is None else moved,
            buckets=buckets,
            tensors=tensors,
            seconds=dict(self._seconds),
            checksums=dict(self._expected.checksums) if self._expected is not None else {},
            unverified=self._expected.unverified if self._expected is not None else (),
            peers=self._update.outcomes(),
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start


def _dtypes(peers: Sequence[WeightPeer]) -> set[str]:
    return {peer.dtype for peer in peers if peer.dtype is not None}


def make_pusher(config: Config, context: WorkerContext, peers: Sequence[WeightPeer] = ()) -> WeightPusher:
    """Return the pusher for a config.

    :param peers: The engines that it will send to, if they are known: all of one kind.
    """
    options = config.weight_sync
    if peers and not peers[0].needs_transport:
        return WeightPusher(options, TensorTransport(), Buffers(partial(torch.empty, dtype=torch.uint8)))
    spec: WeightTransportSpec = context.plugins.get("register_weight_transports", options.transport)
    # A server that is divided has processes on other devices too, and memory that its allocator reserves for
    # sleep takes no copy from another device: CUDA calls it an invalid argument.
    is_divided = any(peer.tensor_parallel > 1 for peer in peers)
    if spec.shares_buffers and (is_divided or context.device.type == "cpu"):
        buffers = Buffers(shared_memory)
    elif spec.shares_buffers:
        buffers = Buffers(partial(_mappable, context.device))
    else:
        device = torch.device(spec.buffer_device(context) if spec.buffer_device is not None else "cpu")
        lends = None if device.type == "cpu" else device.type
        buffers = Buffers(partial(torch.empty, dtype=torch.uint8, device=device), lends=lends)
    return WeightPusher(options, spec.make(config, context), buffers)


def _mappable(device: Device, size: int) -> Tensor:
    """Return bytes on a device that its other processes can map, uint8."""
    with device.shareable():
        return torch.empty(size, dtype=torch.uint8, device=device.torch_device)
