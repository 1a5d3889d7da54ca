"""Offloading of a train engine: device memory and its host copies.

The unit is a storage: its bytes go to the host and it shrinks to none, so that every view of it, of which
engines keep many, is whole again once it has its size and its bytes back. Megatron's own way gives each
parameter of the optimizer a storage of its own, and float32 weights, which the optimizer updates through
views of them, would never change again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from anygauge_hooks.errors import AsleepError
from anygauge_hooks.serving import MemoryState
from anygauge_hooks.types import Device

__all__ = ["DeviceMemory", "HostCopies"]

CHUNK_BYTES = 256 * 2**20
"""Host memory allocated at a time. Pinned memory is rounded up to a power of two, so this is one."""
Storage = torch.UntypedStorage
Find = Callable[[], Iterable[Tensor]]
_ORDER: Sequence[MemoryState] = ("nothing", "weights", "everything")


class DeviceMemory:
    """Moves an engine between the amounts that it may have on the device.

    :param weights: Finds the tensors of the model.
    :param rest: Finds what else a step changes.
    :param temporary: Finds what each step fills again; its bytes are not kept, and are zeros afterwards.
    :param pinned: Whether host memory of the copies is pinned; ``None`` pins it for any accelerator.
    """

    def __init__(
        self, device: Device, *, weights: Find, rest: Find, temporary: Find, pinned: bool | None = None
    ) -> None:
        self._device = device
        self._weights, self._rest, self._temporary = weights, rest, temporary
        self._weight_copies = HostCopies(device, pinned=pinned)
        self._rest_copies = HostCopies(device, pinned=pinned)
        self._dropped: list[tuple[Storage, int]] = []
        """With the bytes that each had."""
        self.state: MemoryState = "everything"

    def set_state(self, state: MemoryState) -> None:
        """Set the memory state (sleep, wake up)."""
        while self.state != state:
            at, to = _ORDER.index(self.state), _ORDER.index(state)
            if to < at:
                self._give_up(self.state)
            else:
                self._take_back(_ORDER[at + 1])
            self.state = _ORDER[at + (1 if to > at else -1)]

    def need(self, state: MemoryState, purpose: str) -> None:
        """Check that the device has at least this state.

        :raises AsleepError: It has less.
        """
        if _ORDER.index(self.state) < _ORDER.index(state):
            raise AsleepError(
                f"The train engine was asked for {purpose}, which takes {state} on the device; it has "
                f"{self.state} there.",
                hint="Wake it up first: call its ``set_memory_state`` with a larger state.",
            )

    def _give_up(self, level: MemoryState) -> None:
        weights = self._storages(self._weights())
        if level == "weights":
            self._weight_copies.take(weights)
            return
        shared = {storage.data_ptr() for storage in weights}
        for storage in self._storages(self._temporary(), without=shared):
            self._dropped.append((storage, storage.nbytes()))
            storage.resize_(0)
        self._rest_copies.take(self._storages(self._rest(), without=shared))

    def _take_back(self, level: MemoryState) -> None:
        if level == "weights":
            self._weight_copies.give_back()
            return
        self._rest_copies.give_back()
        while self._dropped:
            storage, size = self._dropped.pop()
            storage.resize_(size)
            _bytes(storage).zero_()

    def _storages(self, tensors: Iterable[Tensor], without: Collection[int] = ()) -> list[Storage]:
        """Return what tensors on the device lie in, each once.

        :param without: Addresses of storages that are left out.
        """
        storages = (each.untyped_storage() for each in tensors if each.device.type == self._device.type)
        by_address = {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
        return [storage for address, storage in by_address.items() if address not in without]


class HostCopies:
    """Host copies of offloaded storages, in reused host memory.

    :param chunk_bytes: Size of each piece of that memory.
    """

    def __init__(self, device: Device, *, chunk_bytes: int = CHUNK_BYTES, pinned: bool | None = None) -> None:
        self._device = device
        self._pinned = device.type != "cpu" if pinned is None else pinned
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []
        self._held: list[tuple[Storage, int]] = []
        """With the bytes that each had."""

    def take(self, storages: Iterable[Storage]) -> None:
        """Copy storages to the host, then resize them to 0. No storage may be offloaded before."""
        assert not self._held, "taken twice"
        self._held = [(storage, storage.nbytes()) for storage in storages]
        for host, own in self._pieces():
            host.copy_(own, non_blocking=True)
        self._device.synchronize()
        for storage, _ in self._held:
            storage.resize_(0)

    def give_back(self) -> None:
        """Restore the storages' sizes and bytes."""
        for storage, size in self._held:
            storage.resize_(size)
        for host, own in self._pieces():
            own.copy_(host, non_blocking=True)
        self._device.synchronize()
        self._held = []

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield host memory and the bytes on the device that belong there."""
        at = 0
        for storage, size in self._held:
            device_bytes, done = _bytes(storage), 0
            while done < size:
                number, offset = divmod(at + done, self._chunk_bytes)
                length = min(self._chunk_bytes - offset, size - done)
                yield self._chunk(number)[offset : offset + length], device_bytes[done : done + length]
                done += length
            at += size

    def _chunk(self, number: int) -> Tensor:
        while len(self._chunks) <= number:
            self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=self._pinned))
        return self._chunks[number]


def _bytes(storage: Storage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
