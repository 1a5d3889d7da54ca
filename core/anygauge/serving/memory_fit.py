"""Memory fit: whether trainers and rollout engines have room on their devices at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

__all__ = ["Awake", "MemoryFit"]

Awake = Literal["engines", "nobody", "trainers"]
HEADROOM = 0.1
"""Part of each device that must stay free, since later steps may have longer samples."""
LEAST = 0.04
"""Part of each device below which what is free may not fall once both are awake."""


class MemoryFit:
    """Free memory of the devices in a step in which trainers and engines alternate.

    Each side is measured at the end of its phase, when its allocator has reserved the most that it needed.
    With ``f(x)`` bytes free while ``x`` is awake, both leave ``f(engines) + f(trainers) - f(nobody)``.

    :param memory: Returns :meth:`anygauge_hooks.types.Device.memory` of each trainer's device.
    :param buffer_bytes: Memory of the weight sync, which comes on top.
    """

    def __init__(self, memory: Callable[[], Sequence[Mapping[str, int]]], buffer_bytes: int) -> None:
        self._memory = memory
        self._buffer_bytes = buffer_bytes
        self._free: dict[Awake, Sequence[int]] = {}
        self._totals: Sequence[int] = ()

    def note(self, awake: Awake) -> None:
        """Measure the devices while exactly one side, or nobody, is awake."""
        devices = self._memory()
        # Without an allocator of its own a device is the host, whose memory is not divided between the two.
        if all("reserved" in device and "free" in device for device in devices):
            self._free[awake] = [device["free"] for device in devices]
            self._totals = [device["total"] for device in devices]

    def forget(self) -> None:
        """Forget what was measured: an engine was lost."""
        self._free.clear()

    def spare_bytes(self) -> int | None:
        """Return what the fullest device has left over if both are awake: negative if they do not fit.

        :returns: ``None`` until every state was measured.
        """
        if len(self._free) < 3:
            return None
        states = zip(*(self._free[awake] for awake in ("engines", "trainers", "nobody")), strict=True)
        spare: Iterator[int] = (
            engines + trainers - nobody - int(total * HEADROOM) - self._buffer_bytes
            for (engines, trainers, nobody), total in zip(states, self._totals, strict=True)
        )
        return min(spare)

    def is_short(self) -> bool:
        """Return whether a device has too little left now, both being awake."""
        return any(device["free"] < device["total"] * LEAST for device in self._memory())
