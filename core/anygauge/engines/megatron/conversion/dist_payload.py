"""One tensor as ``torch.save`` wrote it, within a file: the file itself where its elements lie in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

__all__ = ["load_payload"]


def load_payload(view: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return a tensor without a copy of its elements, unless they lie in another order than rows.

    Nothing is compressed, so that the file can be the memory of the tensor. torch itself says where in it the
    elements are, and in which order.

    :param view: Of the whole archive.
    :param shape: That it must have, but for axes of length 1.
    :raises ValueError: It is no such tensor, or torn.
    """
    with _reading(), FakeTensorMode():
        form = torch.load(_open(view), weights_only=True)
    if not isinstance(form, Tensor):
        raise ValueError(f"it holds {type(form).__name__}, where a tensor belongs")
    actual, wanted = tuple(form.shape), tuple(shape)
    if form.dtype != dtype or [n for n in actual if n != 1] != [n for n in wanted if n != 1]:
        raise ValueError(f"it holds {form.dtype} of shape {actual}, where .metadata says {dtype} of {wanted}")
    with _reading():
        first = form.untyped_storage()._checkpoint_offset
        if first is not None and form.is_contiguous() and form.numel():
            start = first + form.storage_offset() * dtype.itemsize
            return torch.frombuffer(view[start : start + form.nbytes], dtype=dtype).view(wanted)
        tensor: Tensor = torch.load(_open(view), map_location="cpu", weights_only=True)
        return tensor.detach().reshape(wanted)


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # foreign code: torch reads what is torn
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _open(view: memoryview) -> Any:
    return BufferedReader(_Stream(view))


class _Stream(RawIOBase):
    """Bytes in memory as a file, without a copy of them."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        piece = self._view[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)
