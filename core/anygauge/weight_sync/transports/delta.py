"""Delta transport: sends only the bytes that changed, to a receiver beside each server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anygauge.weight_sync.buckets import unpack
from anygauge.weight_sync.changes import Change, bytes_view, changed, framed, whole
from anygauge.weight_sync.checksum import checksum
from anygauge.weight_sync.control import EngineControl
from anygauge.weight_sync.receiver import SECRET_HEADER
from anygauge.weight_sync.watchdog import describe
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.weights import WeightTransport

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.weights import WeightBucket, WeightPeer, WeightTensor, WeightUpdate

__all__ = ["DeltaTransport"]


class DeltaTransport(WeightTransport):
    """Keeps a host copy of the last weights, and sends the differences.

    A receiver that does not hold that version gets everything. A server that was started again, or failed to
    load, gets everything from its receiver.

    :param deadline_s: Longest wait for a receiver, in seconds.
    :param forgets: Whether servers give their weights up between updates, so that each needs everything from
        its receiver.
    """

    stages = True
    opens_session = False

    def __init__(self, *, deadline_s: float, forgets: bool = False) -> None:
        self._deadline_s = deadline_s
        self._forgets = forgets
        self._copy: list[tuple[WeightTensor, Tensor]] = []
        self._sums: list[str] = []
        self._version: int | None = None
        """Version of the copy; ``None`` while an update is in progress."""
        self._base: int | None = None
        """Version of the copy before it."""
        self._loaded: dict[str, int] = {}
        """How often each server that has the copy's weights had been started, by address."""
        self._behind: set[str] = set()
        """Addresses of servers whose receivers hold the base; the others get everything."""
        self._moved: dict[str, int] = {}
        self._number = 0
        """Number of the next tensor."""

    def connect(self, peers: Sequence[WeightPeer]) -> None:
        """Find the receivers that have the version of the copy.

        :raises RolloutError: A server has no receiver, or it does not answer.
        """
        self._base, self._version, self._number = self._version, None, 0
        self._moved = dict.fromkeys((peer.address for peer in peers), 0)
        held = {peer.address: self._post(peer, "/state", b"{}", "its version")["version"] for peer in peers}
        self._behind = {
            each for each, version in held.items() if version is not None and version == self._base
        }

    def send(self, bucket: WeightBucket, update: WeightUpdate) -> None:
        """Send the changes of a bucket."""
        what = describe(bucket, update.version)
        if bucket.index == 0:
            update.each(self._begin, loads=False)
        tensors = [tensor for _, tensor in unpack(bucket.tensors, bucket.data)]
        numbers = range(self._number, self._number + len(tensors))
        self._number = numbers.stop
        places = bucket.tensors
        changes = [self._changed(*each) for each in zip(numbers, places, tensors, strict=True)]
        few = framed([], [each for each in changes if each is not None])
        full = b""
        if any(peer.address not in self._behind for peer in update.peers):
            pairs = zip(numbers, tensors, strict=True)
            full = framed(places, [whole(i, bytes_view(tensor), self._sums[i]) for i, tensor in pairs])

        def post(peer: WeightPeer) -> None:
            self._post(peer, "/changes", few if peer.address in self._behind else full, what)

        update.each(post, loads=False)
        if bucket.last:
            self._version = update.version

    def _begin(self, peer: WeightPeer) -> None:
        base = self._base if peer.address in self._behind else None
        self._post(peer, "/begin", json.dumps({"base": base}).encode(), "the begin of an update")

    def _changed(self, number: int, place: WeightTensor, tensor: Tensor) -> Change | None:
        """Return what changed of a tensor since the base, and keep it."""
        if self._base is None:
            self._copy.append((place, tensor.clone()))
            self._sums.append(checksum(tensor))
            return None
        known, copy = self._copy[number]
        if known[:3] != place[:3]:
            raise RolloutError(
                f"{place.name} {list(place.shape)} came in place of {known.name} "
                f"{list(known.shape)} of the previous update.",
                hint="The weights of a run are the same tensors in the same order.",
            )
        change = changed(number, bytes_view(copy), bytes_view(tensor), tensor.itemsize)
        if change is not None:
            self._sums[number] = checksum(tensor)
            change = change._replace(checksum=self._sums[number])
            copy.copy_(tensor)
        return change

    def wire_bytes(self) -> int | None:
        """Return the most bytes sent to one server, without HTTP headers."""
        return max(self._moved.values(), default=0)

    def commit(self, update: WeightUpdate) -> None:
        """Let each receiver load the changes into its server, or all weights if the server has others."""

        def load(peer: WeightPeer) -> None:
            everything = self._loaded.pop(peer.address, None) != peer.incarnation or self._forgets
            body = {"version": update.version, "everything": everything, "flushes": update.flushes}
            self._post(peer, "/load", json.dumps(body).encode(), f"to load version {update.version}")
            self._loaded[peer.address] = peer.incarnation

        update.each(load, loads=True)

    def _post(self, peer: WeightPeer, path: str, data: bytes, what: str) -> Mapping[str, Any]:
        if peer.receiver is None:
            raise RolloutError(
                f"{peer.address} has no receiver, which the transport delta needs.",
                hint='Use "distributed" or "disk" for an external server.',
            )
        receiver = EngineControl(
            f"http://{peer.receiver}", lambda _: {SECRET_HEADER: peer.secret}, deadline_s=self._deadline_s
        )
        answer = receiver.post(path, [data], what=f"{what}, beside {peer.address}")
        self._moved[peer.address] = self._moved.get(peer.address, 0) + len(data)
        return answer

    def abandon(self) -> None:
        """Forget the servers' versions, and the copy if it is incomplete.

        A server that loaded what it does not hold gets everything from its receiver in the next update.
        """
        self._loaded.clear()
        if self._version is None:
            self._copy, self._sums = [], []

    def close(self) -> None:
        """Release the copy."""
        self._copy, self._sums, self._version = [], [], None
