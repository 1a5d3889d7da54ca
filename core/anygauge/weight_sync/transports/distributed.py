"""Weight transport by broadcast from a training rank to every process of every server."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from anygauge.distributed.addresses import in_url
from anygauge.failures import in_background
from anygauge.weight_sync.broadcast import Membership, Rendezvous, address_toward, finish, join_group
from anygauge.weight_sync.buckets import unpack
from anygauge.weight_sync.watchdog import describe, within
from anygauge_hooks.errors import AnygaugeError, RolloutError
from anygauge_hooks.weights import BroadcastGroup, WeightTransport

if TYPE_CHECKING:
    import torch

    from anygauge_hooks.weights import WeightBucket, WeightPeer, WeightUpdate

__all__ = ["DistributedTransport"]

FAREWELL_S = 5.0
"""Longest wait for a server to leave a group that is no longer used."""
SPARE_S = 30.0
"""Margin by which an accelerator's library outwaits the deadline, since some libraries then end the process.
Gloo does not, and its groups end no sooner than the collectives in them."""


class DistributedTransport(WeightTransport):
    """A process group with the servers, rebuilt when one of them was restarted.

    Each training rank that sends has its own: servers expect the sender to be the first rank of a group.

    :param device_type: Type of device of the buckets; the servers must run on such devices too.
    :param backends: The ``torch.distributed`` backend of each type of device that is known here.
    :param deadline_s: Longest time for the group to form, and for one broadcast, in seconds.
    :param sender: Training rank of this process, for errors.
    """

    def __init__(
        self, device_type: str, backends: Mapping[str, str], *, deadline_s: float, sender: int = 0
    ) -> None:
        self._sender = sender
        self._device_type, self._backends = device_type, backends
        self._backend = backends[device_type]
        self._deadline_s = deadline_s
        self._members: tuple[WeightPeer, ...] = ()
        self._name = ""
        self._group: Membership | None = None
        self._at = ""
        """The tensor that is being broadcast."""
        self._device: torch.device | None = None
        """On which broadcasts were started."""

    def connect(self, peers: Sequence[WeightPeer]) -> None:
        """Create a group with exactly these servers and incarnations, if there is none.

        :raises RolloutError: One refuses to join, or would form groups of another kind.
        :raises DeadlineError: One does not come.
        """
        if self._group is not None and self._members == tuple(peers):
            return
        self.abandon()
        self._check_devices(peers)
        self._members, self._name = tuple(peers), f"anygauge-{secrets.token_hex(4)}"
        rendezvous = Rendezvous(address_toward(peers[0].address), timeout_s=self._deadline_s)
        joins = self._invite(rendezvous)
        try:
            self._group = within(
                self._deadline_s,
                partial(
                    join_group,
                    rendezvous.host,
                    rendezvous.port,
                    rank=0,
                    world_size=_size(peers),
                    name=self._name,
                    backend=self._backend,
                    timeout_s=self._deadline_s + (0.0 if self._device_type == "cpu" else SPARE_S),
                    store=rendezvous.store,
                ),
                what=f"The group of training rank {self._sender} and {_addresses(peers)}",
                release=self.abandon,
                given_up=lambda: _first_error(joins),
            )
        except RuntimeError as error:  # of torch: somebody did not come
            self.abandon()
            raise _as_ours(error, f"The group with {_addresses(peers)} could not be made") from error
        wait(joins)
        if refusal := _first_error(joins):
            self.abandon()
            raise refusal

    def _check_devices(self, peers: Sequence[WeightPeer]) -> None:
        """Refuse ends that no library connects: each would wait for the other until a deadline."""
        for peer in peers:
            if peer.device not in (None, self._device_type):
                theirs = self._backends.get(peer.device or "", "a library that is not known here")
                raise RolloutError(
                    f"{peer.address} runs on {peer.device!r} and forms groups with {theirs}; "
                    f"training rank {self._sender} runs on {self._device_type!r} and forms groups with "
                    f"{self._backend}.",
                    hint="Start the server on the same kind of device, or "
                    'set weight_sync.transport = "disk".',
                )

    def _invite(self, rendezvous: Rendezvous) -> list[Future[None]]:
        """Ask every server to join, each in a thread: it answers once all have come."""
        ranks = accumulate((peer.tensor_parallel for peer in self._members), initial=1)
        host, size = in_url(rendezvous.host), _size(self._members)
        group = BroadcastGroup(self._name, host, rendezvous.port, self._backend, size, first_rank=0)
        return [
            in_background(
                partial(self._request_join, peer, group._replace(first_rank=rank)), "weight-sync-join"
            )
            for peer, rank in zip(self._members, ranks, strict=False)
        ]

    def _request_join(self, peer: WeightPeer, group: BroadcastGroup) -> None:
        target = peer.target(deadline_s=self._deadline_s)
        try:
            target.join_group(group)
        finally:
            target.close()

    def send(self, bucket: WeightBucket, update: WeightUpdate) -> None:
        """Broadcast a bucket, while the servers are asked to receive it.

        On an accelerator both ends go on once their devices have been asked: while the bytes of a bucket
        move, the servers are told of the next. One that refuses ends the group, and so the update: the others
        may wait for bytes that it would have passed on.
        """
        group, peers = self._group, update.peers
        assert group is not None, "connect comes first"
        if len(peers) < len(self._members):
            raise RolloutError(
                f"{_addresses([each for each in self._members if each not in peers])} takes no part in the "
                f"update to version {update.version}, so that nothing can be broadcast to the others.",
                hint="The next update is sent without it, or after its restart.",
            )
        asking = in_background(partial(self._request, bucket, update), "weight-sync-request")
        what = describe(bucket, update.version)
        try:
            within(
                self._deadline_s,
                partial(self._broadcast, group, bucket, by_tensor=not _flattened(peers)),
                what=f"The broadcast of {what} to {_addresses(peers)}",
                release=self.abandon,
                given_up=lambda: _refusal(peers, update, what),
            )
        except RuntimeError as error:
            self.abandon()
            where = f" at {self._at}" if self._at else ""
            raise _as_ours(error, f"The broadcast of {what} to {_addresses(peers)} broke{where}") from error
        asking.result()
        if refusal := _refusal(peers, update, what):
            self.abandon()
            raise refusal
        self._device = bucket.data.device

    def _request(self, bucket: WeightBucket, update: WeightUpdate) -> None:
        whole = _flattened(update.peers)
        update.load(lambda target: target.load_broadcast(bucket, update, self._name, whole=whole))

    def _broadcast(self, group: Membership, bucket: WeightBucket, *, by_tensor: bool) -> None:
        if not by_tensor:
            group.start(bucket.data)
            return
        for name, tensor in unpack(bucket.tensors, bucket.data):
            self._at = name
            group.start(tensor)
        self._at = ""

    def commit(self, update: WeightUpdate) -> None:
        """Wait until everything is sent: the servers load each bucket as it arrives."""
        if self._device is None:
            return
        within(
            self._deadline_s,
            partial(finish, self._device),
            what=f"The broadcast of {describe(None, update.version)} to {_addresses(update.peers)}",
            release=self.abandon,
        )

    def abandon(self) -> None:
        """Leave the group on all sides, which ends pending broadcasts."""
        self._leave(broken=True)

    def _leave(self, *, broken: bool) -> None:
        group, self._group = self._group, None
        members, self._members = self._members, ()
        if members:
            self._dismiss(members)
        if group is not None:
            group.close(broken=broken)

    def _dismiss(self, members: Sequence[WeightPeer]) -> None:
        with ThreadPoolExecutor(len(members)) as threads:
            list(threads.map(self._request_leave, members))

    def _request_leave(self, peer: WeightPeer) -> None:
        target = peer.target(deadline_s=min(FAREWELL_S, self._deadline_s))
        with suppress(AnygaugeError):  # it never joined, has ended, or hangs: it is no longer counted on
            target.leave_group(self._name)
        target.close()

    def close(self) -> None:
        """Leave the group."""
        self._leave(broken=False)


def _size(peers: Sequence[WeightPeer]) -> int:
    return 1 + sum(peer.tensor_parallel for peer in peers)


def _flattened(peers: Sequence[WeightPeer]) -> bool:
    return all(peer.takes_whole_buckets for peer in peers)


def _addresses(peers: Sequence[WeightPeer]) -> str:
    return ", ".join(peer.address for peer in peers)


def _first_error(futures: Sequence[Future[None]]) -> BaseException | None:
    """Return what went wrong first, as far as the futures are done."""
    return next((error for each in futures if each.done() and (error := each.exception())), None)


def _refusal(asked: Sequence[WeightPeer], update: WeightUpdate, what: str) -> BaseException | None:
    left = update.peers
    gone = [peer for peer in asked if peer not in left]
    return RolloutError(f"{_addresses(gone)} did not take {what}.") if gone else None


def _as_ours(error: RuntimeError, what: str) -> BaseException:
    if isinstance(error, AnygaugeError):
        return error
    return RolloutError(f"{what}: {str(error).splitlines()[0]}", hint="See the engines' logs.")
