"""Progress mark of a scoring process: the sample it works on, readable whatever the process does."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from typing import IO

__all__ = ["Mark", "mark_file"]

_SIZE = 16


def mark_file() -> IO[bytes]:
    """Return a file without a name for the marks of one process."""
    file = os.fdopen(os.memfd_create("mark", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b")
    file.truncate(_SIZE)
    # A file that shrinks kills whoever has it mapped, and a reward function may try.
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return file


class Mark:
    """An index and the time of its beginning, in memory that two processes share.

    :param descriptor: Descriptor of a :func:`mark_file`; not needed any more afterwards.
    """

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, _SIZE)
        self._cells = memoryview(self._map).cast("q")

    def begin(self, index: int) -> None:
        """Say that work on a sample begins."""
        self._cells[1] = time.monotonic_ns()
        self._cells[0] = index + 1

    def end(self) -> None:
        """Say that it has ended."""
        self._cells[0] = 0

    def read(self) -> tuple[int, int] | None:
        """Return the sample at work and when that began (monotonic, in ns), or ``None`` between two."""
        index, started = self._cells[0], self._cells[1]
        return (index - 1, started) if index and index == self._cells[0] else None

    def close(self) -> None:
        """Give the memory back."""
        self._cells.release()
        self._map.close()
