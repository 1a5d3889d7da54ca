"""Directories that appear and disappear at once, and files that are on the disk when that is said of them."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

__all__ = ["free_name", "publish", "remove", "remove_abandoned", "write_file"]

ABANDONED = (".*.partial-*", ".*.new", ".*.removed")
"""Names of directories that a process was about to publish, or to remove, when it was killed."""


def write_file(path: Path, content: bytes) -> None:
    """Write a file and see it to the disk."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def directory_to_disk(path: Path) -> None:
    """See the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(source: Path, target: Path) -> None:
    """Rename a complete directory, in place of an earlier one of the name."""
    if target.exists():
        remove(target)
    source.rename(target)
    directory_to_disk(target.parent)


def remove(path: Path) -> None:
    """Remove a directory; from the first moment on it has a name that nobody takes for a whole one."""
    leaving = path.with_name(f".{path.name}.removed")
    shutil.rmtree(leaving, ignore_errors=True)
    path.rename(leaving)
    shutil.rmtree(leaving)


def remove_abandoned(directory: Path) -> None:
    """Remove the directories that a killed process had not published, or not quite removed."""
    for pattern in ABANDONED:
        for path in directory.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


def free_name(path: Path) -> Path:
    """Return a path, or the first of ``NAME-2``, ``NAME-3``, ... that is free; a suffix stays the last."""
    if not os.path.lexists(path):
        return path
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(each for each in numbered if not os.path.lexists(each))
