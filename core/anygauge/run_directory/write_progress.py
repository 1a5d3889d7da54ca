"""Progress of a checkpoint or an export that a run waits for."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["WriteProgress", "expected_bytes", "export_progress"]

QUIET_S = 2.0
"""Seconds of waiting that need no word."""
EVERY_S = 5.0
LOOK_S = 0.5
_GIB = 2.0**30
_LENGTH = 8
"""Bytes at the beginning of a safetensors file that say how long its header is."""


class WriteProgress:
    """Says every few seconds how much of a checkpoint's files is written.

    :param directory: Directory that the ranks write to.
    :param name: Name of the checkpoint in the messages.
    :param say: Takes a line: ``step-00000040: 3.2 of 20.1 GiB written, 1.1 GiB/s, 15 s left``.
    :param clock: Seconds, as ``time.monotonic``.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._name, self._say, self._clock = directory, name, say, clock
        self._started = clock()
        self._before = _sizes(directory)[0]
        self._due = self._started + QUIET_S

    def update(self) -> None:
        """Say how much is written, if the last word is some seconds old."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + EVERY_S
        written, size = _sizes(self._directory)
        rate = (written - self._before) / (now - self._started)
        parts = [f"{written / _GIB:.1f} of {size / _GIB:.1f} GiB written"]
        if written >= size:
            parts.append("being flushed and verified")
        elif rate > 0:
            parts += [f"{rate / _GIB:.2f} GiB/s", f"{(size - written) / rate:.0f} s left"]
        self._say(f"waiting for the checkpoint {self._name}: {', '.join(parts)}")


def expected_bytes(model: Path, itemsize: int) -> int:
    """Return about how many bytes the tensors of a model have in an export; 0 if its files do not say.

    :param model: A Hugging Face directory.
    :param itemsize: Bytes of one element in the export.
    """
    try:
        described = [each for file in model.glob("*.safetensors") for each in _tensors(file)[1]]
        elements: int = sum(math.prod(each["shape"]) for each in described)
    except (KeyError, OSError, TypeError, ValueError):  # whoever loads the model says what is wrong with it
        return 0
    return itemsize * elements


@contextmanager
def export_progress(target: Path, say: Callable[[str], None], size: int = 0) -> Iterator[None]:
    """Say every few seconds how much of an export is written while the block waits for it.

    :param target: Directory that appears when the export is complete, but for that of a critic in it.
    :param say: Takes a line, in a thread of its own:
        ``waiting for the export hf: 3.2 of about 20.1 GiB written, 1.10 GiB/s, 15 s left``.
    :param size: About how many bytes there will be; 0 if that is not known.
    """
    done, started = threading.Event(), time.monotonic()

    def watch() -> None:
        due = started + QUIET_S
        while not done.wait(LOOK_S):
            if (now := time.monotonic()) >= due:
                due = now + EVERY_S
                say(f"waiting for the export {target.name}: {_rate(target, now - started, size)}")

    thread = threading.Thread(target=watch, name="export-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _rate(target: Path, seconds: float, size: int) -> str:
    """Return how much of an export is written, and in how many seconds it will be, if ``size`` is known."""
    partial = target.parent.glob(f".{target.name}.partial-*")
    written = sum(_sizes(path)[0] for path in (target, *partial))
    rate = written / seconds
    if not (rate and written < size):
        return f"{written / _GIB:.1f} GiB written, {rate / _GIB:.2f} GiB/s"
    left = f"{rate / _GIB:.2f} GiB/s, {(size - written) / rate:.0f} s left"
    return f"{written / _GIB:.1f} of about {size / _GIB:.1f} GiB written, {left}"


def _sizes(directory: Path) -> tuple[int, int]:
    """Return how many bytes the files of a directory have, and how many they will have."""
    written = size = 0
    # a walk takes a directory that went away for an empty one
    for path in (Path(folder, name) for folder, _, names in os.walk(directory) for name in names):
        try:
            own = path.stat().st_size
            expected = _announced(path) if path.suffix == ".safetensors" else own
        except (OSError, ValueError):  # the file was renamed, or its header is not whole yet
            continue
        written, size = written + own, size + max(own, expected)
    return written, size


def _announced(path: Path) -> int:
    """Return the size of a safetensors file according to its header.

    :raises ValueError: The header is not there yet.
    """
    start, tensors = _tensors(path)
    return start + max((each["data_offsets"][1] for each in tensors), default=0)


def _tensors(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return where the tensors of a safetensors file begin, and what its header says of each.

    :raises ValueError: The header is not there yet.
    """
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH), "little")
        header = json.loads(stream.read(min(length, path.stat().st_size)))
    return _LENGTH + length, [entry for name, entry in header.items() if name != "__metadata__"]
