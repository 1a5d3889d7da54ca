"""Weight buckets of bounded size, in two buffers: one is filled while the other is being sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from anygauge_hooks.weights import WeightBucket, WeightTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Buffers", "cut", "dtype_of", "overlapped", "unpack"]

Weights = Iterable[tuple[str, "Tensor"]]


def _fits(size: int, tensor: Tensor, max_bytes: int) -> bool:
    """Return whether a tensor can lie behind ``size`` bytes of others."""
    return size + tensor.nbytes <= max_bytes and size % tensor.itemsize == 0


class Buffers:
    """Two buffers, used alternately, that grow to the size of the largest bucket.

    :param allocate: Returns that many bytes, uint8.
    :param lends: Type of device of the tensors that may be sent from where they lie, if any may.
    """

    def __init__(self, allocate: Callable[[int], Tensor], *, lends: str | None = None) -> None:
        self._allocate = allocate
        self.lends = lends
        self._held: list[Tensor | None] = [None, None]
        self._next = 0

    def take(self, size: int, capacity: int) -> Tensor:
        """Return ``size`` bytes of the next buffer.

        :param capacity: Bytes to allocate, where the buffer is too small; ``size`` if that is more.
        """
        held = self._held[self._next]
        if held is None or held.numel() < size:
            self._held[self._next] = None  # before the new one is there
            held = self._held[self._next] = self._allocate(max(size, capacity))
        self._next = (self._next + 1) % len(self._held)
        return held[:size]

    def release(self) -> None:
        """Release the memory."""
        self._held = [None] * len(self._held)


def cut(
    weights: Weights, max_bytes: int, buffers: Buffers, *, completes: bool = True
) -> Iterator[WeightBucket]:
    """Yield the weights as buckets. A bucket is valid until the second one after it is requested.

    The tensors are gathered as they are asked for, so every rank of a collective must cut alike or iterate.

    :param completes: Whether the final bucket is the last of the update.
    """
    packer = _Packer(buffers, max_bytes)
    for name, tensor in weights:
        if not packer.fits(tensor):
            yield packer.bucket(last=False)
        packer.add(name, tensor)
    yield packer.bucket(last=completes)


class _Packer:
    """Copies tensors into a buffer one by one, so that only one exists besides the buffer."""

    def __init__(self, buffers: Buffers, max_bytes: int) -> None:
        self._buffers = buffers
        self._max_bytes = max_bytes
        self._index = 0
        self._tensors: list[WeightTensor] = []
        self._data: Tensor | None = None

    @property
    def _size(self) -> int:
        return self._tensors[-1].end if self._tensors else 0

    def fits(self, tensor: Tensor) -> bool:
        """Return whether a tensor fits in the current bucket."""
        return not self._tensors or _fits(self._size, tensor, self._max_bytes)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor."""
        import torch

        start = self._size
        end = start + tensor.nbytes
        source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if end >= self._max_bytes and not start and tensor.device.type == self._buffers.lends:
            self._data = source  # it fills a bucket by itself
        else:
            if self._data is None:
                self._data = self._buffers.take(max(self._max_bytes, end), self._max_bytes)
            self._data[start:end].copy_(source)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._tensors.append(WeightTensor(name, tuple(tensor.shape), dtype, start, end))

    def bucket(self, *, last: bool) -> WeightBucket:
        """Return the added tensors as a bucket, and start a new one."""
        data = self._data if self._data is not None else self._buffers.take(0, 0)
        bucket = WeightBucket(
            index=self._index, tensors=tuple(self._tensors), data=data[: self._size], last=last
        )
        self._index, self._tensors, self._data = self._index + 1, [], None
        return bucket


def overlapped(buckets: Iterator[WeightBucket], send: Callable[[WeightBucket], None]) -> None:
    """Send each bucket in a thread while this thread packs the next.

    The buckets are made in the calling thread: gathering is a collective, and a device's state is a thread's.

    :param send: Raises to end it; what it raises comes out here.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="weight-sync") as thread:
        under_way: Future[None] | None = None
        for bucket in buckets:
            if under_way is not None:
                under_way.result()
            under_way = thread.submit(send, bucket)
        if under_way is not None:
            under_way.result()


def unpack(tensors: Sequence[WeightTensor], data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a bucket, as views."""
    for each in tensors:
        yield each.name, data[each.start : each.end].view(dtype_of(each.dtype)).reshape(each.shape)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name."""
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), f"{name} is no dtype"
    return dtype
