"""One update of all servers by several senders: training ranks that each send the tensors that they hold.

Training rank 0 controls the update and is the only one that pauses, begins, ends, verifies and resumes. The
senders send one after another, each in a process group of its own: a server handles one request at a time,
and takes a broadcast only from the first rank of a group. After each step all training ranks tell each other
how it went, so that an error of one ends the update on all of them, and nobody waits for a sender that has
given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from pydantic import TypeAdapter

from anygauge.distributed.all_gather import all_gather_values
from anygauge.weight_sync.delivery import Delivered, Delivery, Sender
from anygauge.weight_sync.push import Push
from anygauge_hooks.errors import AnygaugeError, RolloutError

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.weights import WeightPeer

__all__ = ["JointPush"]

T = TypeVar("T")


class _Told(NamedTuple, Generic[T]):
    """Outcome of a step on a rank, as told to the others."""

    problem: str | None
    """Its error."""
    failed: dict[str, str]
    """Errors of servers, by address."""
    result: T | None
    """Result of the step on the rank that took it; ``None`` on the others."""


_CONNECTED = TypeAdapter(_Told[None])
_OPENED = TypeAdapter(_Told[bool])
_DELIVERED = TypeAdapter(_Told[Delivered])


class JointPush(Push):
    """One rank's part in an update. All training ranks make one, also those that send nothing.

    :param weights: Full tensors by the rank that sends them, in the order in which they send.
    :param rank: Training rank of this process.
    """

    def __init__(
        self,
        sender: Sender,
        version: int,
        peers: Sequence[WeightPeer],
        weights: Mapping[int, Iterator[tuple[str, Tensor]]],
        *,
        rank: int,
    ) -> None:
        super().__init__(sender, version, peers, iter(()), pauses=rank == 0)
        self._rank = rank
        self._parts = weights
        self.senders = len(weights)

    def _deliver(self) -> None:
        with self._timed("connect"):
            for sender in self._parts:
                self._step(sender, partial(self._transport.connect, self._all), _CONNECTED)
        verifies = self._step(0, self._open_update, _OPENED)
        self._delivery = Delivery(self._sender, self._update, verifies=verifies)
        with self._timed("move"):
            self._send_parts()
        if self._rank == 0:
            self._finish()

    def _open_update(self) -> bool:
        """Open the update, and return whether the senders have to verify."""
        self._open()
        return self._sender.verifies(self._all)

    def _send_parts(self) -> None:
        last = list(self._parts)[-1]
        for sender, stream in self._parts.items():
            send = partial(self._send_part, stream, completes=sender == last)
            delivered = self._step(sender, send, _DELIVERED, assist=partial(self._assist, stream))
            if self._rank == 0 != sender:
                self._delivery.include(delivered)

    def _send_part(self, stream: Iterator[tuple[str, Tensor]], *, completes: bool) -> Delivered:
        """Send what this rank holds. The tensors are iterated to their end: others give shards of them."""
        try:
            self._delivery.move(stream, completes=completes)
            self._commit()
        finally:
            for _ in stream:
                pass
        return self._delivery.summary()

    def _assist(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        """Give this rank's shards of what another rank sends."""
        if self._rank == 0:
            self._update.load(lambda target: None)  # from now on the servers may hold mixed weights
        for _ in stream:
            pass

    def _step(
        self,
        rank: int,
        work: Callable[[], T],
        kind: TypeAdapter[Any],
        *,
        assist: Callable[[], None] = lambda: None,
    ) -> T:
        """Take a step of the update with all ranks, and return what one of them made of it. A collective.

        :param rank: The rank that does the work.
        :param assist: The part of the others.
        :raises RolloutError: Another rank has failed.
        """
        result, failure = None, None
        try:
            if self._rank == rank:
                result = work()
            else:
                assist()
        except Exception as error:  # noqa: BLE001 - foreign code: transports, engines; raised below on this rank
            failure = error
        failed = {address: _message(error) for address, error in self._update.errors().items()}
        told = all_gather_values(_Told(None if failure is None else _message(failure), failed, result), kind)
        for number, each in enumerate(told):
            self._update.exclude(each.failed)
            if each.problem is not None:
                raise failure or RolloutError(f"Training rank {number} failed: {each.problem}")
        value: T = told[rank].result
        return value


def _message(error: BaseException) -> str:
    return str(error.args[0]) if isinstance(error, AnygaugeError) else f"{type(error).__name__}: {error}"
