"""One update of all servers by one sender."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from anygauge.weight_sync.delivery import Delivery, Sender
from anygauge.weight_sync.protocol import RunningUpdate, started
from anygauge.weight_sync.report import SyncReport
from anygauge_hooks.errors import RolloutError, WeightMappingError

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.weights import WeightPeer

__all__ = ["Push"]


class Push:
    """One update.

    :param weights: Full tensors under Hugging Face names.
    :param pauses: Whether to pause the servers and to let them go on.
    """

    senders = 1
    """Training ranks that send."""

    def __init__(
        self,
        sender: Sender,
        version: int,
        peers: Sequence[WeightPeer],
        weights: Iterator[tuple[str, Tensor]],
        *,
        pauses: bool,
    ) -> None:
        self._sender = sender
        self._weights = weights
        self._options = sender.options
        self._transport = sender.transport
        self._version = version
        self._all = tuple(peers)
        self._update = RunningUpdate(
            version,
            peers,
            sender.outcomes,
            pause=self._options.pause if pauses else "none",
            flushes=self._options.pause != "in_place",
            deadline_s=self._options.deadline_s,
        )
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._delivery = Delivery(sender, self._update, verifies=sender.verifies(peers))

    def run(self) -> SyncReport:
        """Send the weights, and return the outcome of each server."""
        started = time.perf_counter()
        try:
            self._deliver()
        except BaseException as error:  # foreign code: transports and engines
            self._transport.abandon()
            self._update.give_up(error)
            self._remember()
            reported = isinstance(error, RolloutError | TimeoutError | OSError | WeightMappingError)
            if self._delivery.is_local or not reported:
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

    def _deliver(self) -> None:
        transport = self._transport
        with self._timed("connect"):
            transport.connect(self._all)
        if not transport.stages:
            self._open()
        with self._timed("move"):
            self._delivery.move(self._weights)
        if transport.stages:
            self._open()
        self._commit()
        self._finish()

    def _open(self) -> None:
        with self._timed("begin"):
            self._update.open(session=self._transport.opens_session)
        self._delivery.check_peers()

    def _commit(self) -> None:
        with self._timed("load"):
            self._transport.commit(self._update)
        if self._delivery.verifies:
            with self._timed("verify"):
                self._delivery.compare()

    def _finish(self) -> None:
        with self._timed("end"):
            self._update.end(session=self._transport.opens_session)
        if self._delivery.expected is not None:
            with self._timed("verify"):
                self._update.verify(self._delivery.expected.differences)

    def _remember(self) -> None:
        for peer, outcome in zip(self._all, self._update.outcomes(), strict=True):
            self._sender.outcomes[started(peer)] = outcome
            if self._delivery.verifies and outcome.version == self._version:
                self._sender.verified.add(started(peer))

    def _report(self) -> SyncReport:
        delivery, expected = self._delivery, self._delivery.expected
        moved = self._transport.wire_bytes()
        return SyncReport(
            version=self._version,
            transport=self._options.transport,
            bytes=delivery.bytes,
            wire_bytes=delivery.bytes if moved is None else moved,
            buckets=delivery.buckets,
            tensors=delivery.tensors,
            senders=self.senders,
            seconds=dict(self._seconds),
            checksums=dict(expected.checksums) if expected is not None else {},
            unverified=expected.unverified if expected is not None else (),
            peers=self._update.outcomes(),
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start
