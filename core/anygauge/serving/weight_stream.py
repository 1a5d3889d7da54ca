"""Weight stream: sends new weights to rollout engines in other processes, in parts of bounded size.

The training workers gather the weights; rank 0 sends them to the driver part by part, and the driver passes
each part on to every engine. Neither side holds more than two parts beside its own copy of the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Full, Queue
from typing import TYPE_CHECKING

from anygauge.runtime.rpc import decode, encode
from anygauge.weight_sync.buckets import groups_of
from anygauge_hooks.engines import RolloutEngine, WeightStream
from anygauge_hooks.errors import RolloutError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["PickledBucket", "StreamedUpdate", "WeightSender"]

POLL_S = 0.1
"""Interval of checks whether an engine that stopped taking weights has failed."""

Weights = Iterator[tuple[str, "Tensor"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledBucket:
    """A part of the weights, ready to travel."""

    data: bytes
    """Pickled names and host tensors; empty on all ranks but the first."""
    last: bool


class WeightSender:
    """Cuts the weights of a train engine into parts. Every rank cuts alike, since gathering is a collective.

    :param is_sender: Whether this rank hands out what it gathers.
    """

    def __init__(self, *, is_sender: bool) -> None:
        self._is_sender = is_sender
        self._rest: Iterator[tuple[list[tuple[str, Tensor]], bool]] | None = None

    def next(self, weights: Callable[[], Weights], max_bytes: int) -> PickledBucket:
        """Return the next part; after the last one, the next call begins with the weights as they are then.

        :param weights: Starts to yield the weights, full tensors.
        :param max_bytes: Of a part, unless it is one larger tensor.
        """
        if self._rest is None:
            self._rest = groups_of(self._kept(weights()), max_bytes)
        tensors, last = next(self._rest)
        if last:
            self._rest = None
        return PickledBucket(data=encode(tensors) if self._is_sender else b"", last=last)

    def _kept(self, weights: Weights) -> Weights:
        """Yield what a part holds: tensors on the host, or where nothing is sent what has their sizes."""
        for name, tensor in weights:
            yield name, _on_host(tensor) if self._is_sender else tensor.to("meta")


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory with a storage of its own: a view would be pickled with all behind it."""
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


class StreamedUpdate:
    """One running update of an engine, which takes its weights from a queue in a thread of its own."""

    def __init__(self, engine: RolloutEngine, version: int, device: torch.device) -> None:
        self._parts: Queue[bytes | None] = Queue(maxsize=1)
        self._error: BaseException | None = None
        self._cancelled = False
        self.version = version
        self._thread = threading.Thread(target=self._run, args=(engine, version, device), daemon=True)
        self._thread.start()

    def _run(self, engine: RolloutEngine, version: int, device: torch.device) -> None:
        try:
            _use(device)
            engine.update_weights(self._stream(), version)
        except BaseException as error:  # noqa: BLE001 - foreign code: a rollout engine
            self._error = error

    def _stream(self) -> WeightStream:
        while (data := self._parts.get()) is not None:
            yield from decode(data)
        if self._cancelled:
            raise RolloutError("A weight update was given up before its end.", hint="Send all weights again.")

    def put(self, data: bytes | None) -> None:
        """Hand over a part, or ``None`` at the end, as soon as the engine has taken the one before.

        :raises WeightMappingError: What the engine raised.
        """
        while self._thread.is_alive():
            try:
                self._parts.put(data, timeout=POLL_S)
            except Full:
                continue
            break
        else:
            self.finish()

    def finish(self) -> None:
        """Wait for the engine, and raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Let the engine go."""
        self._cancelled = True
        while self._thread.is_alive():
            try:
                self._parts.put(None, timeout=POLL_S)
            except Full:
                continue
            self._thread.join(POLL_S)


def _use(device: torch.device) -> None:
    """Make a device current in this thread, where a thread has one."""
    import torch

    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
